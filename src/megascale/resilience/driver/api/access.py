"""Access to a run's driver: the tokens of its API, and files that give access from machines without the run folder.

There is one token for reading and one for orders, neither of which is the agents' token. Each is in a file of mode 600
in RUN/driver and nowhere else; a person who may see a run but not steer it gets the text of `token.read`.

An access file has address, certificate and token. It names the certificate that the driver shows now. A certificate of
the job's own, made at each start of the driver, is valid until that driver ends; with `resilience.tls_certificate` and
`resilience.api_port` an access file stays valid.
"""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megascale.core.addresses import is_loopback, list_interface_addresses
from megascale.core.untrusted_files import open_regular
from megascale.errors import ConfigError, DataError
from megascale.resilience.driver.api.tls import CERTIFICATE, create_trusting_context
from megascale.resilience.protocol.contact import driver_folder, read_contact
from megascale.services import shared_token

LOG_PIECE = 64 << 10  # bytes of a log that are read at once
_ACCESS_LIMIT = 64 << 10  # bytes of an access file
_READ, _ACT = "token.read", "token.act"


@dataclass(frozen=True)
class ApiTokens:
    """read: for questions; act: for questions and orders."""

    read: bytes
    act: bytes


def make_tokens(run: Path) -> ApiTokens:
    """Return the run's tokens, created at the first start. Raise DataError as shared_token.read_token does."""
    return ApiTokens(
        shared_token.make_token(driver_folder(run) / _READ), shared_token.make_token(driver_folder(run) / _ACT)
    )


def read_tokens(run: Path) -> ApiTokens:
    """Return the run's tokens. Raise DataError as shared_token.read_token does."""
    return ApiTokens(
        shared_token.read_token(driver_folder(run) / _READ), shared_token.read_token(driver_folder(run) / _ACT)
    )


@dataclass(frozen=True)
class Access:
    """The data with which a command reaches a driver.

    Attributes:
        job: name of the run.
        api: base URL.
        token: for reading, or for orders too.
        certificate: that the driver shows, in PEM form; "": without TLS.
    """

    job: str
    api: str
    token: str
    certificate: str = ""

    def context(self) -> ssl.SSLContext:
        """Return a context that trusts this certificate and no other."""
        return create_trusting_context(self.certificate)

    def to_text(self) -> str:
        """Return the access as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def create_access(run: Path, act: bool, host: str) -> Access:
    """Create access to the driver of a run folder.

    Args:
        run: the run folder.
        act: the access is for orders too.
        host: at which other machines reach the driver, "": where it listens.

    Raises:
        ConfigError: other machines cannot reach the driver.
        DataError: no driver was started.
    """
    contact = read_contact(run)
    tokens = read_tokens(run)
    url = urlsplit(contact.api)
    host = host or url.hostname or ""
    if host in ("0.0.0.0", "::"):
        # This machine's own name means loopback on many machines.
        host = next((address for address in list_interface_addresses().values() if not is_loopback(address)), host)
    if url.scheme != "https" or is_loopback(host) or host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"the driver of {run} is at {contact.api}, which only its own machine reaches: launch with "
            "--resilience.listen=ADDRESS (--host names one), or forward the port (ssh -L) and copy the run's driver/"
        )
    token = tokens.act if act else tokens.read
    if ":" in host:
        host = f"[{host}]"
    certificate = (driver_folder(run) / CERTIFICATE).read_text()
    return Access(contact.job, f"https://{host}:{url.port}", token.decode(), certificate)


def read_access(file: Path) -> Access:
    """Read the output of `megascale access`. Raise DataError for a file that others can read, or anything else."""
    try:
        with open(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(_ACCESS_LIMIT)
        if mode & 0o077:
            raise DataError(f"{file} has a token and can be read by others; run `chmod 600 {file}`")
        access = Access(**json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is neither a run folder nor an access file ({error}); see `megascale access`"
        ) from None
    if not all(isinstance(value, str) for value in asdict(access).values()) or urlsplit(access.api).scheme != "https":
        raise DataError(f"{file} gives no access to a run; see `megascale access`")
    return access


def read_log_piece(file: Path, after: int) -> tuple[int, bytes] | None:
    """Return (position, at most LOG_PIECE bytes) of a log from byte `after` on, None if there is no log.

    A position below 0 counts from the end. One behind the end, of a log that was begun anew, means its beginning.
    """
    try:
        with open(file, "rb", opener=open_regular) as log:
            size = log.seek(0, os.SEEK_END)
            start = after
            if after < 0:
                start = max(0, size + after)
            elif after > size:
                start = 0
            log.seek(start)
            return start, log.read(LOG_PIECE)
    except OSError:
        return None
