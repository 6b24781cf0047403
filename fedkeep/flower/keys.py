"""Keys for a test federation: a certificate authority, the SuperLink's certificate, and a key pair for each site."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, MissingExtra, RunError, in_one_line

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise MissingExtra("Making keys", "flower") from error

PEM = serialization.Encoding.PEM
UNENCRYPTED = serialization.NoEncryption()
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*(?!\d+\Z){_LABEL}", re.ASCII | re.IGNORECASE)


def make_keys(folder: Path, sites: Sequence[str], hosts: Sequence[str], days: int = 365) -> list[Path]:
    """Write keys and certificates into a new folder. Only the user who runs this can read the private keys.

    The files are ``ca.crt``, which every party gets; ``superlink.key`` and ``superlink.crt`` for the SuperLink; and for
    each site ``NAME.key``, which only that site gets, and ``NAME.pub``, which is registered with the SuperLink. The
    authority's own key is not stored, so that nobody can sign another certificate with it.

    ``folder``: A new or empty folder.
    ``hosts``: Host names and IP addresses under which sites reach the SuperLink; ``localhost`` is added.
    ``days``: How many days the certificates are valid.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty, and keys are never overwritten. Choose another folder.")
    if len(set(sites)) < len(sites) or not all(map(_is_file_name, sites)):
        raise ConfigError(f"sites must be different names that can be file names, not {', '.join(sites)!r}.")
    if reserved := [site for site in sites if site.casefold() == "superlink"]:
        raise ConfigError(f"no site can be called {reserved[0]!r}, since the SuperLink's own key has that name.")
    named = dict.fromkeys(["localhost", *hosts])  # nginx checks no address of the SuperLink behind it, only a name
    alternatives = x509.SubjectAlternativeName([_host(host) for host in named])
    authority, authority_name = ec.generate_private_key(ec.SECP384R1()), _name("FedKeep test authority")
    of_ca = (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False),
    )
    ca = _certificate(authority_name, authority.public_key(), authority_name, days, of_ca)
    link = ec.generate_private_key(ec.SECP384R1())
    of_link = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (alternatives, False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    )
    cert = _certificate(_name("SuperLink"), link.public_key(), authority_name, days, of_link)
    written = {
        "ca.crt": ca.sign(authority, hashes.SHA384()).public_bytes(PEM),
        "superlink.crt": cert.sign(authority, hashes.SHA384()).public_bytes(PEM),
        "superlink.key": link.private_bytes(PEM, serialization.PrivateFormat.PKCS8, UNENCRYPTED),
    }
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        written[f"{site}.key"] = key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, UNENCRYPTED)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        written[f"{site}.pub"] = public + b"\n"
    return [atomic_write(folder / name, content, secret=name.endswith(".key")) for name, content in written.items()]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    days: int,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.CertificateBuilder:
    """Return a certificate to be signed; each extension says whether it is critical."""
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the machines' clocks may differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    for extension, critical in extensions:
        certificate = certificate.add_extension(extension, critical)
    return certificate


def _usage(*allowed: str) -> x509.KeyUsage:
    names = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    names += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: name in allowed for name in names})


def _is_file_name(site: str) -> bool:
    # A file has a longer name while it is written.
    return site.isprintable() and site == Path(site).name != "" and len(os.fsencode(site)) <= 230


def _host(name: str) -> x509.GeneralName:
    """Return a host as a certificate names it; `ConfigError` for what no site would ever find there."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if len(name) <= 253 and _HOST_NAME.fullmatch(name):
            return x509.DNSName(name)
    raise ConfigError(
        f"{in_one_line(repr(name), 80)} is no host name and no IP address. Give it without https://, port or path, and "
        "letters that are not ASCII in their encoded form, xn--..."
    )
