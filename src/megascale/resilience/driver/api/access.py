"""Access to a run's driver from a machine that does not see the run folder: address, certificate and token in one file.

Whoever holds the file may do what its token allows. It names the certificate that the driver shows now: with one of the
job's own, made at each start of the driver, it ends with that driver; with `resilience.tls_certificate` and
`resilience.api_port` it lasts.
"""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megascale.core.addresses import is_loopback, list_interface_addresses
from megascale.errors import ConfigError, DataError
from megascale.resilience.driver.api.tls import CERTIFICATE, trusting
from megascale.resilience.driver.api.tokens import read_tokens
from megascale.resilience.protocol.contact import driver_folder, read_contact

_MOST = 64 << 10  # bytes of such a file


@dataclass(frozen=True)
class Access:
    """What a command needs to talk to a driver.

    Attributes:
        job: name of the run.
        api: base URL.
        token: for looking, or for orders too.
        certificate: in PEM form, that the driver shows; "": no TLS.
    """

    job: str
    api: str
    token: str
    certificate: str = ""

    def context(self) -> ssl.SSLContext:
        """Trusts this certificate and no other."""
        return trusting(self.certificate)

    def to_text(self) -> str:
        """As JSON, a line."""
        return json.dumps(asdict(self)) + "\n"


def create_access(run: Path, act: bool, host: str) -> Access:
    """Access to the driver of a run folder.

    Args:
        act: for orders too.
        host: at which other machines reach the driver, "": where it listens.

    Raises ConfigError where other machines cannot reach it, DataError where no driver was started.
    """
    contact, tokens = read_contact(run), read_tokens(run)
    parts = urlsplit(contact.api)
    host = host or parts.hostname or ""
    if host in ("0.0.0.0", "::"):
        # This machine's own name means loopback on many.
        host = next((address for address in list_interface_addresses().values() if not is_loopback(address)), host)
    if parts.scheme != "https" or is_loopback(host) or host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"the driver of {run} is at {contact.api}, which only its own machine reaches: launch with "
            "--resilience.listen=ADDRESS (--host names one), or forward the port (ssh -L) and copy the run's driver/"
        )
    token = tokens.act if act else tokens.read
    shown = f"[{host}]" if ":" in host else host
    certificate = (driver_folder(run) / CERTIFICATE).read_text()
    return Access(contact.job, f"https://{shown}:{parts.port}", token.decode(), certificate)


def read_access(file: Path) -> Access:
    """What `megascale access` wrote. DataError for a file that others can read, or anything else."""
    try:
        with open(file) as opened:
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read(_MOST)
        if mode & 0o077:
            raise DataError(f"{file} holds a token and can be read by others; run `chmod 600 {file}`")
        access = Access(**json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is no run folder and gives no access to one ({error}); see `megascale access`"
        ) from None
    if not all(isinstance(value, str) for value in asdict(access).values()) or urlsplit(access.api).scheme != "https":
        raise DataError(f"{file} gives no access to a run; see `megascale access`")
    return access
