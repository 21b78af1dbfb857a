"""Start of an agent by a user, systemd or a container: the agent asks a driver to join a job."""

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
    find_agent,
    get_default_folder,
    prepare_node_folder,
    record_agent_process,
)
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import JobOffer, Refuse
from megascale.resilience.protocol.job_description import JobDescription
from megascale.services.framing import ProtocolError

_MIN_SECRET_CHARACTERS = 32
_MAX_SECRET_CHARACTERS = 200
_READ_CHARACTERS = 4096  # of a secret's file or line that are read
_ANSWER_TIMEOUT = 10.0  # seconds for the answer of a driver


def read_secret(file: str | None) -> bytes:
    """Return the secret of the job, and remove it from the environment.

    Args:
        file: path of a private file, "-" for the first line of stdin, or None for the environment.

    Raises:
        ConfigError: there is no secret, or it is malformed.
        DataError: the file cannot be read, or other users can read it.
    """
    text = take_job_secret()
    if file is None:
        if not text:
            raise ConfigError(
                f"the job's secret is missing: pass --secret-file FILE (- for stdin) or set {JOB_SECRET_VARIABLE} in "
                "the environment; the secret is in RUN/driver/token on the driver's machine"
            )
    elif file == "-":
        text = sys.stdin.readline(_READ_CHARACTERS)
    else:
        text = _read_private_file(file)
    secret = text.strip()
    has_valid_length = _MIN_SECRET_CHARACTERS <= len(secret) <= _MAX_SECRET_CHARACTERS
    if not has_valid_length or not secret.isascii():
        raise ConfigError("the job's secret is malformed: it has 64 hexadecimal digits (RUN/driver/token)")
    return secret.encode()


def _read_private_file(path: str) -> str:
    """Return the beginning of a file. Raises DataError if other users can read it."""
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_READ_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--secret-file={path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise DataError(f"--secret-file={path} can be read by others; run `chmod 600 {path}`")
    return text


def parse_driver_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPV6]:PORT. Raises ConfigError for other text."""
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_valid = host and (is_bracketed or ":" not in host) and port.isdecimal() and 0 < int(port) < 65536
    if not is_valid:
        raise ConfigError(
            f"{text!r} is not the address of a driver; give HOST:PORT, such as head01:29400 or [2001:db8::1]:29400"
        )
    return host, int(port)


@dataclass(frozen=True)
class _Admission:
    """Accepted request to join: address of the driver, address of this machine, and the driver's offer."""

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
        driver_addresses: host and port of each possible driver. Each attempt iterates over them again.
        node: name of this machine in the job.
        folder: parent of the node's folder. Default: ~/.megascale/JOB.
        address: address at which other nodes reach this machine. If empty, the address of `interface` is used, or
            without an interface the address of connections to the driver.
        interface: network interface for the trainers, or an empty text.
        timeout: seconds to wait for a driver.
        report: prints a line on the terminal.
        pod: name of the container. Default: the machine's name.

    Raises:
        ConfigError: the driver refuses, or has another secret.
        TrainingError: no driver answers within `timeout` seconds.
    """
    if interface and not address:
        local_address = get_interface_address(interface)
    else:
        local_address = address
    if local_address:
        _check_local_address(local_address)
    admission = asyncio.run(
        _request_admission(
            driver_addresses,
            job,
            secret=secret,
            node=node,
            address=local_address,
            timeout=timeout,
            report=report,
        )
    )
    offer = admission.offer
    description = JobDescription(
        job,
        offer.epoch,
        admission.driver,
        ResilienceConfig.model_validate_json(offer.limits),
        checkpoints=offer.checkpoints,
        alternative_drivers=tuple(driver for driver in driver_addresses if driver != admission.driver),
    )
    node_folder = folder / node if folder is not None else get_default_folder(job, node)
    pid = find_agent(node_folder)
    if pid and pid != os.getpid():  # A container may give this process the number of the agent before it.
        raise ConfigError(
            f"an agent of node {node} is already running here (process {pid}); end it, or give --node or --folder"
        )
    prepare_node_folder(node_folder, description, secret, offer.marker)
    record_agent_process(node_folder, os.getpid())
    if interface:  # The trainers inherit these variables.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    report(f"node {node} at {admission.address} is in job {job}; trainers write to {node_folder}/runs/{job}")
    serve(node, node_folder, admission.address, pod or socket.gethostname())


def _check_local_address(address: str) -> None:
    """Raise ConfigError if this machine does not have the address, at which its trainers must listen."""
    try:
        family, socket_type, protocol, _, endpoint = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket_type, protocol) as probe:
            probe.bind(endpoint)
    except socket.gaierror as error:
        raise ConfigError(f"--address={address} does not resolve on this machine ({error.strerror})") from None
    except OSError:
        raise ConfigError(
            f"--address={address} is not an address of this machine; `ip address` lists its addresses"
        ) from None


async def _request_admission(
    driver_addresses: Iterable[tuple[str, int]],
    job: str,
    *,
    secret: bytes,
    node: str,
    address: str,
    timeout: float,
    report: Callable[[str], None],
) -> _Admission:
    """Send join requests to the possible drivers in turn until one accepts.

    address: address of this machine, "": that of the connection to the driver.
    """
    deadline = time.monotonic() + timeout
    problem = ""
    reported_problem = ""
    fields: dict[str, Any] = {
        "job": job,
        "node": node,
        "hardware": node_health.describe_hardware(),
        "versions": node_health.read_versions(),
    }
    while True:
        for driver in driver_addresses:
            host, port = driver
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT):
                    local_address = address or find_local_address(host)
                    offer = await _request_offer(driver, secret, fields | {"address": local_address})
                return _Admission(driver, local_address, offer)
            except ProtocolError as error:
                problem = f"{host}:{port}: {error}"
                if "token" in str(error):
                    raise ConfigError(
                        f"the driver at {problem}: the secret is that of another job or an older one"
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
    """Send a join request to a driver, and return its offer. Raises ConfigError if the driver refuses."""
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
