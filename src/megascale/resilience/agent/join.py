"""An agent that a person, systemd or a container starts with a driver's address, a job's name and its secret."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.config import ResilienceConfig
from megascale.core.addresses import find_local_address, get_interface_address
from megascale.core.secrets import JOB_SECRET_VARIABLE, take_job_secret
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.resilience.agent import node_health
from megascale.resilience.agent.agent import serve
from megascale.resilience.agent.driver_link import RETRY_INTERVAL, connect
from megascale.resilience.agent.node_folder import (
    default_folder,
    find_agent,
    prepare_node_folder,
    record_agent_process,
)
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import JobOffer, Refuse
from megascale.resilience.protocol.job_description import JobDescription
from megascale.services.framing import ProtocolError

_SECRET_CHARACTERS = (32, 200)  # least and most
_ANSWER_TIMEOUT = 10.0  # seconds for a driver to answer


def read_secret(file: str | None) -> bytes:
    """Return the job's secret, and remove it from the environment.

    Args:
        file: a private file, "-" for the first line of stdin, or None for the environment.

    Raises:
        ConfigError: there is no secret, or it is malformed.
        DataError: the file cannot be read, or others can read it.
    """
    text = take_job_secret()
    if file is None:
        if not text:
            raise ConfigError(
                f"the job's secret is missing: pass --secret-file FILE (- for stdin) or set {JOB_SECRET_VARIABLE} in "
                "the environment; the secret is in RUN/driver/token on the driver's machine"
            )
    elif file == "-":
        text = sys.stdin.readline(4096)
    else:
        text = _read_private_file(file)
    secret = text.strip()
    least, most = _SECRET_CHARACTERS
    if not least <= len(secret) <= most or not secret.isascii():
        raise ConfigError("the job's secret is malformed: it has 64 hexadecimal digits (RUN/driver/token)")
    return secret.encode()


def _read_private_file(file: str) -> str:
    try:
        with open(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--secret-file={file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise DataError(f"--secret-file={file} can be read by others; run `chmod 600 {file}`")
    return text


def parse_driver_address(text: str) -> tuple[str, int]:
    """Return (host, port) of HOST:PORT or [IPV6]:PORT. Raises ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_valid = host and (is_bracketed or ":" not in host) and port.isdecimal() and 0 < int(port) < 65536
    if not is_valid:
        raise ConfigError(
            f"{text!r} is no address of a driver; write HOST:PORT, such as head01:29400 or [2001:db8::1]:29400"
        )
    return host, int(port)


@dataclass(frozen=True)
class _Admission:
    """An accepted request to join: the driver's address, this machine's address, and the job."""

    driver: tuple[str, int]
    address: str
    offer: JobOffer


def join_job(
    driver_addresses: Iterable[tuple[str, int]],
    job: str,
    secret: bytes,
    node: str,
    folder: Path | None,
    address: str,
    interface: str,
    timeout: float,
    report: Callable[[str], None],
    pod: str = "",
) -> None:
    """Join a job and run this machine's agent until the job ends.

    Args:
        driver_addresses: addresses that a driver of the job may have, iterated again for each attempt.
        node: name of this machine in the job.
        folder: parent of the node's folder, None: ~/.megascale/JOB.
        address: address at which other nodes reach this machine, "": that of `interface`, else the one that reaches
            the driver.
        timeout: seconds to wait for a driver.
        report: prints a line on the terminal.
        pod: name of the container, default: the machine's name.

    Raises:
        ConfigError: the driver refuses, or has another secret.
        TrainingError: no driver answers in time.
    """
    if interface and not address:
        own_address = get_interface_address(interface)
    else:
        own_address = address
    if own_address:
        _check_own_address(own_address)
    admission = asyncio.run(_request_admission(driver_addresses, job, secret, node, own_address, timeout, report))
    offer = admission.offer
    description = JobDescription(
        job,
        offer.epoch,
        admission.driver,
        ResilienceConfig.model_validate_json(offer.limits),
        checkpoints=offer.checkpoints,
        alternative_drivers=tuple(driver for driver in driver_addresses if driver != admission.driver),
    )
    home = folder / node if folder is not None else default_folder(job, node)
    pid = find_agent(home)
    if pid and pid != os.getpid():
        raise ConfigError(
            f"an agent of node {node} runs here already (process {pid}); end it, or give --node or --folder"
        )
    prepare_node_folder(home, description, secret, offer.marker)
    record_agent_process(home, os.getpid())
    if interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    report(f"node {node} at {admission.address} is in job {job}; trainers write to {home}/runs/{job}")
    serve(node, home, admission.address, pod or socket.gethostname())


def _check_own_address(address: str) -> None:
    """Raise ConfigError unless this machine has the address, at which its trainers must listen."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(endpoint)
    except socket.gaierror as error:
        raise ConfigError(f"--address={address} does not resolve on this machine ({error.strerror})") from None
    except OSError:
        raise ConfigError(
            f"--address={address} is no address of this machine; `ip address` lists those it has"
        ) from None


async def _request_admission(
    driver_addresses: Iterable[tuple[str, int]],
    job: str,
    secret: bytes,
    node: str,
    address: str,
    timeout: float,
    report: Callable[[str], None],
) -> _Admission:
    """Send join requests to the drivers in turn until one accepts."""
    deadline = time.monotonic() + timeout
    problem = ""
    reported_problem = ""
    fields: dict[str, Any] = {
        "job": job,
        "node": node,
        "hardware": node_health.hardware(),
        "versions": node_health.versions(),
    }
    while True:
        for driver in driver_addresses:
            host, port = driver
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT):
                    own_address = address or find_local_address(host)
                    offer = await _request_offer(driver, secret, fields | {"address": own_address})
                return _Admission(driver, own_address, offer)
            except ProtocolError as error:
                problem = f"{host}:{port}: {error}"
                if "token" in str(error):
                    raise ConfigError(
                        f"the driver at {problem}: the secret is another job's, or an older one"
                    ) from None
            except socket.gaierror as error:
                problem = f"the name {host} does not resolve on this machine ({error.strerror})"
            except TimeoutError:
                problem = f"{host}:{port} does not answer"
            except (OSError, EOFError) as error:
                problem = str(error) or type(error).__name__
            if problem != reported_problem:
                report(f"waiting for a driver: {problem}")
                reported_problem = problem
        if time.monotonic() > deadline:
            raise TrainingError(
                f"no driver of job {job} answered within {timeout:g} s: {problem}; is `megascale launch` running?"
            )
        await asyncio.sleep(RETRY_INTERVAL)


async def _request_offer(driver: tuple[str, int], secret: bytes, fields: dict[str, Any]) -> JobOffer:
    reader, writer = await connect(*driver)
    try:
        channel = await agent_channel.open_channel(reader, writer, secret, driver=False)
        channel.send_message(do="join", version=agent_channel.VERSION, **fields)
        answer = await channel.receive()
    finally:
        writer.close()
    if isinstance(answer, Refuse):
        raise ConfigError(f"the driver refused this node: {answer.reason}")
    if not isinstance(answer, JobOffer):
        raise ProtocolError(f"the driver answered {answer.do!r} to a request to join")
    return answer
