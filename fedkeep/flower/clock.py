"""How far a site's clock is from its server's: Flower lets no node in whose signature comes from the future."""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from fedkeep.errors import ConfigError, RunError

AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower 1.41 bears: SYSTEM_TIME_TOLERANCE, and TIMESTAMP_TOLERANCE with it


def describe_clock(superlink: str, authority: str | None) -> tuple[str, bool]:
    """Say how far this machine's clock is from a server's, which its answers tell, and whether Flower bears that.

    ``authority``: The file of the server's authority; None for a server without TLS.
    """
    host, _, digits = superlink.rpartition(":")
    if not host or not digits.isdecimal() or int(digits) > 65535:
        raise ConfigError(f"{superlink!r} is no address. Give HOST:PORT, such as fl.example.org:8000.")
    port, connection = int(digits), HTTPConnection(host, int(digits), timeout=10)
    if authority is not None:
        try:
            connection = HTTPSConnection(host, port, timeout=10, context=ssl.create_default_context(cafile=authority))
        except OSError as error:
            raise ConfigError(f"--root-certificates {authority}: {error}.") from None
    try:
        began = time.time()
        connection.request("GET", "/")
        told = connection.getresponse().getheader("Date")
        ahead = (began + time.time()) / 2 - parsedate_to_datetime(str(told)).timestamp() - 0.5  # of whole seconds
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"{superlink} shows a certificate that is refused here: {error.verify_message}. If it is called expired or "
            "not yet valid, look at this machine's clock first."
        ) from None
    except (OSError, HTTPException) as error:
        raise RunError(f"{superlink} does not answer: {error}. Is its proxy running, and the address right?") from None
    except (TypeError, ValueError):
        raise RunError(f"{superlink} does not tell the time. Compare the clocks by hand, with `date -u`.") from None
    finally:
        connection.close()
    apart = f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if -BEHIND < ahead < AHEAD:
        return f"{apart}: near enough", True
    return (
        f"{apart}. Flower lets in nobody whose clock is more than {AHEAD:.0f} s ahead or {BEHIND:.0f} s behind, and "
        "does not say so. Set both clocks, such as with `timedatectl set-ntp true`.",
        False,
    )
