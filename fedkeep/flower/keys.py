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
Key = ec.EllipticCurvePrivateKey
AUTHORITY = "FedKeep test authority"
DAYS = 365
"""How many days the certificates are valid."""
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*(?!\d+\Z){_LABEL}", re.ASCII | re.IGNORECASE)


def make_keys(folder: Path, sites: Sequence[str], hosts: Sequence[str]) -> list[Path]:
    """Write keys and certificates into a new folder. Only the user who runs this can read the private keys.

    The files are ``ca.crt``, which every party gets; ``superlink.key`` and ``superlink.crt`` for the SuperLink; and for
    each site ``NAME.key``, which only that site gets, and ``NAME.pub``, which is registered with the SuperLink. The
    authority's own key is not stored, so that nobody can sign another certificate with it.

    ``folder``: A new or empty folder.
    ``hosts``: Host names and IP addresses under which sites reach the SuperLink; ``localhost`` is added.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty, and keys are never overwritten. Choose another folder.")
    if len(set(sites)) < len(sites) or not all(map(_is_file_name, sites)):
        raise ConfigError(f"sites must be different names that can be file names, not {', '.join(sites)!r}.")
    if reserved := [site for site in sites if site.casefold() == "superlink"]:
        raise ConfigError(f"no site can be called {reserved[0]!r}, since the SuperLink's own key has that name.")
    named = dict.fromkeys(["localhost", *hosts])  # nginx checks no address of the SuperLink behind it, only a name
    alternatives = x509.SubjectAlternativeName([_host(host) for host in named])
    authority, link = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    of_ca = (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False),
    )
    of_link = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (alternatives, False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    )
    written = {
        "ca.crt": _certificate(AUTHORITY, authority, authority, of_ca),
        "superlink.crt": _certificate("SuperLink", link, authority, of_link),
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
    subject: str, key: Key, authority: Key, extensions: Sequence[tuple[x509.ExtensionType, bool]]
) -> bytes:
    """Return a certificate that the authority has signed; each extension says whether it is critical."""
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the machines' clocks may differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )
    for extension, critical in extensions:
        certificate = certificate.add_extension(extension, critical)
    return certificate.sign(authority, hashes.SHA384()).public_bytes(PEM)


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
