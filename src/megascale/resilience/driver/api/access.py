"""Access to a run's driver: the tokens of its API, TLS, and files that give access from other machines.

There are two tokens: one for reading and one for orders. The agents have a third one. Each token is in a file of mode
600 in RUN/driver and nowhere else. A person who may see a run but not steer it gets the text of `token.read`.

TLS is on if the address is not loopback. The certificate is the cluster's, or the job creates its own at each start of
the driver. The key of the job's own certificate is deleted once it was loaded. RUN/driver/api.crt has the certificate,
and commands trust this certificate only: a writer of the run folder is trusted (docs/security.md).

An access file has address, certificate and token. With a certificate of the job's own, an access file is valid until
the driver ends. With `resilience.tls_certificate` and `resilience.api_port` it stays valid.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import socket
import ssl
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megascale.config import ResilienceConfig
from megascale.core.addresses import is_loopback, list_interface_addresses
from megascale.core.untrusted_files import open_regular
from megascale.errors import ConfigError, DataError, describe_install
from megascale.resilience.protocol.agent_channel import DriverTls
from megascale.resilience.protocol.contact import driver_folder, read_contact
from megascale.services import shared_token

CERTIFICATE = "api.crt"
LOG_PIECE = 64 << 10  # bytes of a log that are read at once
_ACCESS_LIMIT = 64 << 10  # bytes of an access file
_READ_TOKEN_FILE = "token.read"
_ORDER_TOKEN_FILE = "token.act"
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"
_CERTIFICATE_DAYS = 3650  # for which the job's own certificate is valid: longer than any job
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which Python has no name


@dataclass(frozen=True)
class ApiTokens:
    """The tokens of the API.

    Attributes:
        read: token for questions.
        act: token for questions and orders.
    """

    read: bytes
    act: bytes


def make_tokens(run: Path) -> ApiTokens:
    """Return the run's tokens, created at the first start. Raise DataError as shared_token.read_token does."""
    folder = driver_folder(run)
    return ApiTokens(
        shared_token.make_token(folder / _READ_TOKEN_FILE), shared_token.make_token(folder / _ORDER_TOKEN_FILE)
    )


def read_tokens(run: Path) -> ApiTokens:
    """Return the run's tokens. Raise DataError as shared_token.read_token does."""
    folder = driver_folder(run)
    return ApiTokens(
        shared_token.read_token(folder / _READ_TOKEN_FILE), shared_token.read_token(folder / _ORDER_TOKEN_FILE)
    )


@dataclass(frozen=True)
class Access:
    """The data with which a command reaches a driver.

    Attributes:
        job: name of the run.
        api: base URL.
        token: token for reading, or for orders too.
        certificate: the certificate that the driver shows, in PEM form; "": the API is served without TLS.
    """

    job: str
    api: str
    token: str
    certificate: str = ""

    def make_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts only this certificate."""
        return create_trusting_context(self.certificate)

    def to_text(self) -> str:
        """Return the access as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def create_access(run: Path, *, for_orders: bool, host: str) -> Access:
    """Create access to the driver of a run folder.

    Args:
        for_orders: the access allows orders too.
        host: name or address by which other machines reach the driver, "": the address where it listens.

    Raises:
        ConfigError: other machines cannot reach the driver.
        DataError: no driver was started.
    """
    contact = read_contact(run)
    tokens = read_tokens(run)
    url = urlsplit(contact.api)
    host = host or url.hostname or ""
    if host in ("0.0.0.0", "::"):  # The driver listens on all interfaces.
        # Use an interface's address. The name of this machine resolves to loopback on many machines.
        reachable = [address for address in list_interface_addresses().values() if not is_loopback(address)]
        host = reachable[0] if reachable else host
    if url.scheme != "https" or is_loopback(host) or host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"the driver of {run} is at {contact.api}, which only its own machine reaches: launch with "
            "--resilience.listen=ADDRESS (--host names one), or forward the port (ssh -L) and copy the run's driver/"
        )
    token = tokens.act if for_orders else tokens.read
    if ":" in host:
        host = f"[{host}]"
    certificate = (driver_folder(run) / CERTIFICATE).read_text()
    return Access(contact.job, f"https://{host}:{url.port}", token.decode(), certificate)


def read_access(file: Path) -> Access:
    """Read the output of `megascale access`. Raise DataError for other text or a file that other users can read."""
    try:
        with open(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(_ACCESS_LIMIT)
        if mode & 0o077:  # rights of other users
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

    An `after` below 0 counts from the end. If `after` is behind the end, the log was begun anew, and the piece is from
    its beginning.
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


# TLS ------------------------------------------------------------------------------------------------------------------


def create_server_context(run: Path, host: str, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Create the TLS context of the API, None on loopback unless a certificate is given.

    Args:
        run: the run folder, which gets the certificate.
        host: where the API listens.
        certificate, key: the cluster's files in PEM form; None: the job creates its own certificate.

    Raises:
        ConfigError: the files cannot be used, or no certificate can be created.
    """
    if certificate is None and is_loopback(host):
        (driver_folder(run) / CERTIFICATE).unlink(missing_ok=True)
        return None
    context, pem = _load_certificate(host, certificate, key)
    temporary = (driver_folder(run) / CERTIFICATE).with_suffix(".tmp")
    temporary.write_bytes(pem)
    os.replace(temporary, driver_folder(run) / CERTIFICATE)
    return context


def create_agents_tls(host: str, certificate: str | None, key: str | None) -> DriverTls | None:
    """Create the TLS of the agents' port, None on loopback. For arguments and errors see `create_server_context`.

    Agents have no copy of the certificate. They verify its hash by the secret that they share with the driver.
    """
    if is_loopback(host):
        return None
    context, pem = _load_certificate(host, certificate, key)
    text = pem.decode()
    # A configured file may have a chain, which begins with the server's own certificate.
    leaf = text[text.index(_PEM_BEGIN) : text.index(_PEM_END) + len(_PEM_END)]
    return DriverTls(context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf)).digest())


def create_client_context(run: Path) -> ssl.SSLContext:
    """Create the context of a command, which trusts the certificate of the run's driver under any host name."""
    file = driver_folder(run) / CERTIFICATE
    try:
        return create_trusting_context(file.read_text())
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"{file}, which identifies the driver, cannot be used ({error}); start the driver again with `megascale "
            "launch`"
        ) from None


def create_trusting_context(certificate: str) -> ssl.SSLContext:
    """Create a client's context that trusts only one certificate (PEM). Raise ConfigError if it is invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate itself is known, so its names and dates are not checked: this machine's clock may be days behind.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | _NO_CHECK_TIME)
    try:
        context.load_verify_locations(cadata=certificate)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate of the driver cannot be used ({error})") from None
    return context


def describe_open_addresses(limits: ResilienceConfig, agents: tuple[str, int], api: str) -> tuple[str, ...]:
    """Return a sentence per address that other machines reach: its protection, and how to close it.

    Args:
        limits: the settings in force.
        agents: (host, port) of the agents' port.
        api: base URL of the API.
    """
    sentences: list[str] = []
    remedy = "if all nodes are on this machine, set resilience.listen=127.0.0.1"
    if not is_loopback(limits.listen):
        certificate = "a certificate of the job's own (RUN/driver/api.crt)"
        if limits.tls_certificate is not None:
            certificate = f"resilience.tls_certificate={limits.tls_certificate}"
        listen = f"resilience.listen={limits.listen}: other machines reach"
        sentences = [
            f"{listen} the API at {api}; TLS with {certificate} and the tokens in RUN/driver/token.read and token.act "
            f"protect it; {remedy}",
            f"{listen} the agents' port {agents[1]}; agents prove RUN/driver/token, and their connections use TLS; the "
            "connections between ranks are not encrypted: keep them on a network that only the job's machines reach; "
            f"{remedy}",
        ]
    for key, address in (("agent_metrics", limits.agent_metrics), ("driver_metrics", limits.driver_metrics)):
        host = address.rpartition(":")[0].strip("[]")
        if host and not is_loopback(host):
            sentences.append(
                f"resilience.{key}={address}: every client that reaches this address can read the metrics, without a "
                "token and unencrypted, but can order nothing: keep it on a network that only the job's machines and "
                "their Prometheus reach, or listen on 127.0.0.1"
            )
    return tuple(sentences)


def _load_certificate(host: str, certificate: str | None, key: str | None) -> tuple[ssl.SSLContext, bytes]:
    """Return a server's context and its certificate in PEM form."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is None:
        return context, _load_created(context, host)
    return context, _load_configured(context, certificate, key)


def _load_configured(context: ssl.SSLContext, certificate: str, key: str | None) -> bytes:
    """Load the configured certificate and key into a context; return the certificate. Raises ConfigError."""
    try:
        # Without the callback OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
        return Path(certificate).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"resilience.tls_certificate={certificate} with resilience.tls_key={key} cannot be used ({error}); give "
            "a certificate and its key, unencrypted, in PEM form"
        ) from None


def _load_created(context: ssl.SSLContext, host: str) -> bytes:
    """Create a certificate and a key, load them into a context, and return the certificate."""
    certificate, key = _create_certificate(host)
    with tempfile.TemporaryDirectory() as private:  # Its mode is 700. OpenSSL reads keys from files only.
        file = Path(private) / "pair.pem"
        file.touch(0o600)
        file.write_bytes(key + certificate)
        context.load_cert_chain(file)
    return certificate


def _create_certificate(host: str) -> tuple[bytes, bytes]:
    """Return a self-signed certificate and its key in PEM form."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            f"other machines reach resilience.listen={host}, so the API needs TLS: {describe_install('driver')} for "
            "the package cryptography, with which the job creates a certificate; or set resilience.tls_certificate and "
            "resilience.tls_key; or listen on 127.0.0.1"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "megascale driver")])
    current_time = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(current_time - datetime.timedelta(days=1))  # Clocks differ.
        .not_valid_after(current_time + datetime.timedelta(days=_CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(socket.gethostname() or "localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
    )
