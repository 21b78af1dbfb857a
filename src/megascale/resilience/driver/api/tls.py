"""TLS of the HTTP API: always where its address is not loopback, by the cluster's certificate or the job's own.

A certificate of the job's own is made at each start; its key is never in a file that lasts. Its text goes into
RUN/driver/api.crt, and commands trust it and no other: whoever writes the run folder is trusted (docs/security.md).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import tempfile
from pathlib import Path

from megascale.core.ports import is_loopback
from megascale.errors import ConfigError, describe_install
from megascale.resilience.protocol.agent_channel import DriverTls
from megascale.resilience.protocol.contact import driver_folder

CERTIFICATE = "api.crt"
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_DAYS = 3650  # as long as any job
_NO_CHECK_TIME = 0x200000  # OpenSSL: X509_V_FLAG_NO_CHECK_TIME, which Python has no name for


def server_context(run: Path, host: str, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """What the API speaks TLS with, None on loopback unless a certificate is given.

    Args:
        host: where it listens.
        certificate, key: files in PEM form of the cluster's own; None: the job makes its own.

    Raises ConfigError for files that cannot be used, and where none can be made.
    """
    if certificate is None and is_loopback(host):
        (driver_folder(run) / CERTIFICATE).unlink(missing_ok=True)
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is None:
        text = _load_own(context, host)
    else:
        text = _load_given(context, certificate, key)
    _write(driver_folder(run) / CERTIFICATE, text)
    return context


def agents_tls(host: str, certificate: str | None, key: str | None) -> DriverTls | None:
    """What the agents' port speaks TLS with, None on loopback; arguments and errors as those of `server_context`."""
    if is_loopback(host):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    text = (_load_own(context, host) if certificate is None else _load_given(context, certificate, key)).decode()
    leaf = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
    return DriverTls(context, hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf)).digest())


def client_context(run: Path) -> ssl.SSLContext:
    """What a command trusts: the certificate that the run's driver has, whatever name it is reached by."""
    try:
        return trusting((driver_folder(run) / CERTIFICATE).read_text())
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"{driver_folder(run) / CERTIFICATE}, by which the driver is known, cannot be used ({error}); start the driver "
            "again with `megascale launch`"
        ) from None


def trusting(certificate: str) -> ssl.SSLContext:
    """A client's context that trusts this certificate (PEM) and no other. ConfigError if it is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is known
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # For the same reason its dates say nothing, and this machine's clock may be days behind the driver's.
    context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | _NO_CHECK_TIME)
    try:
        context.load_verify_locations(cadata=certificate)
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate of the driver cannot be used ({error})") from None
    return context


def _load_given(context: ssl.SSLContext, certificate: str, key: str | None) -> bytes:
    try:
        # With a password it would ask on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
        return Path(certificate).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"resilience.tls_certificate={certificate} with resilience.tls_key={key} cannot be used ({error}); give "
            "a certificate and its key, unencrypted, in PEM form"
        ) from None


def _load_own(context: ssl.SSLContext, host: str) -> bytes:
    certificate, key = _make(host)
    with tempfile.TemporaryDirectory() as private:  # of mode 700; OpenSSL reads keys from files only
        file = Path(private) / "pair.pem"
        file.touch(0o600)
        file.write_bytes(key + certificate)
        context.load_cert_chain(file)
    return certificate


def _make(host: str) -> tuple[bytes, bytes]:
    """A certificate that signs itself and its key, in PEM form."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            f"resilience.listen={host} is reached by other machines, so the API needs TLS: {describe_install('driver')} for the "
            "package cryptography, with which the job makes a certificate; or give resilience.tls_certificate and "
            "resilience.tls_key; or listen on 127.0.0.1"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "megascale driver")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(socket.gethostname() or "localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    return (
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
    )


def _write(file: Path, text: bytes) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(text)
    os.replace(temporary, file)
