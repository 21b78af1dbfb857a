"""An agent that a person, systemd or a container starts: it knows where to ask, a job and its secret."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megascale.config import ResilienceConfig
from megascale.core.interfaces import address_of, address_towards
from megascale.core.secrets import JOB_SECRET_VARIABLE, take_job_secret
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.resilience.agent import node_health
from megascale.resilience.agent.agent import serve
from megascale.resilience.agent.driver_link import RETRY, connect
from megascale.resilience.agent.node_folder import agent_process, default_folder, prepare, remember
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import JobOffer, Refuse
from megascale.resilience.protocol.given import JobDescription
from megascale.services.framing import ProtocolError

_LEAST = 32  # characters of a secret
_ANSWER = 10.0  # seconds for a driver to answer


def read_secret(file: str | None) -> bytes:
    """The job's secret: from a private file, "-": the first line of stdin, None: the environment, which forgets it.
    What the environment holds is forgotten in any case.

    Raises ConfigError where there is none, DataError for a file that others can read.
    """
    text = take_job_secret()
    if file is None:
        if not text:
            raise ConfigError(
                f"the job's secret is missing: --secret-file FILE (- for stdin), or {JOB_SECRET_VARIABLE} in the "
                "environment; it stands in RUN/driver/token on the driver's machine"
            )
    elif file == "-":
        text = sys.stdin.readline(4096)
    else:
        try:
            with open(file) as opened:
                mode, text = os.fstat(opened.fileno()).st_mode, opened.read(4096)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--secret-file={file} cannot be read: {getattr(error, 'strerror', error)}") from None
        if stat.S_ISREG(mode) and mode & 0o077:
            raise DataError(f"--secret-file={file} can be read by others; run `chmod 600 {file}`")
    secret = text.strip()
    if not _LEAST <= len(secret) <= 200 or not secret.isascii():
        raise ConfigError("what was given is no job's secret: that has 64 hexadecimal digits (RUN/driver/token)")
    return secret.encode()


def parse_place(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPV6]:PORT; ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{text!r} is no address of a driver; write HOST:PORT, such as head01:29400 or [2001:db8::1]:29400"
        )
    return host, int(port)


def join_job(
    places: Iterable[tuple[str, int]],
    job: str,
    secret: bytes,
    node: str,
    folder: Path | None,
    address: str,
    interface: str,
    wait: float,
    report: Callable[[str], None],
    pod: str = "",
) -> None:
    """Ask a driver into its job, then be the agent of this machine until the job ends.

    Args:
        places: where a driver of the job may be, tried in turn, looked at anew each time.
        node: name of this machine in the job.
        folder: for what nodes keep, None: ~/.megascale/JOB.
        address: at which the other nodes reach this one, "": that of `interface`, else the one that leads to the
            driver.
        wait: seconds to go on asking where no driver answers.
        say: called with a line for people.
        pod: what its container is called, default: this machine's name.

    Raises ConfigError where the driver refuses or cannot be the right one, TrainingError if none answers in time.
    """
    own = address_of(interface) if interface and not address else address
    if own:
        _check_own(own)
    place, own, told = asyncio.run(_ask(places, job, secret, node, own, wait, report))
    description = JobDescription(
        job,
        told.epoch,
        place,
        ResilienceConfig.model_validate_json(told.limits),
        checkpoints=told.checkpoints,
        elsewhere=tuple(each for each in places if each != place),
    )
    home = folder / node if folder is not None else default_folder(job, node)
    if (pid := agent_process(home)) and pid != os.getpid():
        raise ConfigError(
            f"an agent of node {node} runs here already (process {pid}); end it, or give --node or --folder"
        )
    prepare(home, description, secret, told.marker)
    remember(home, os.getpid())
    if interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    report(f"node {node} at {own} is in job {job}; trainers write to {home}/runs/{job}")
    serve(node, home, own, pod or socket.gethostname())


def _check_own(address: str) -> None:
    """ConfigError unless this machine has the address: its trainers must listen there."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except socket.gaierror as error:
        raise ConfigError(f"--address={address} does not resolve on this machine ({error.strerror})") from None
    except OSError:
        raise ConfigError(
            f"--address={address} is no address of this machine; `ip address` lists those it has"
        ) from None


async def _ask(
    places: Iterable[tuple[str, int]],
    job: str,
    secret: bytes,
    node: str,
    address: str,
    wait: float,
    say: Callable[[str], None],
) -> tuple[tuple[str, int], str, JobOffer]:
    """(where the driver is, this machine's address, what it tells of the job)."""
    deadline, said, why = time.monotonic() + wait, "", ""
    hardware, versions = node_health.hardware(), node_health.versions()
    while True:
        for place in places:
            try:
                async with asyncio.timeout(_ANSWER):
                    own = address or address_towards(place[0])
                    fields: dict[str, Any] = {"job": job, "node": node, "address": own}
                    told = await _described(place, secret, fields | {"hardware": hardware, "versions": versions})
                return place, own, told
            except ProtocolError as error:
                why = f"{place[0]}:{place[1]}: {error}"
                if "token" in str(error):
                    raise ConfigError(f"the driver at {why}: the secret is another job's, or an older one") from None
            except socket.gaierror as error:
                why = f"the name {place[0]} does not resolve on this machine ({error.strerror})"
            except TimeoutError:
                why = f"{place[0]}:{place[1]} does not answer"
            except (OSError, EOFError) as error:
                why = str(error) or type(error).__name__
            if why != said:
                say(f"waiting for a driver: {why}")
                said = why
        if time.monotonic() > deadline:
            raise TrainingError(
                f"no driver of job {job} answered within {wait:g} s: {why}; is `megascale launch` running?"
            )
        await asyncio.sleep(RETRY)


async def _described(place: tuple[str, int], secret: bytes, fields: dict[str, Any]) -> JobOffer:
    reader, writer = await connect(*place)
    try:
        channel = await agent_channel.open_channel(reader, writer, secret, driver=False)
        channel.send_message(do="join", version=agent_channel.VERSION, **fields)
        answer = await channel.receive()
    finally:
        writer.close()
    if isinstance(answer, Refuse):
        raise ConfigError(f"the driver refused this node: {answer.reason}")
    if not isinstance(answer, JobOffer):
        raise ProtocolError(f"the driver said {answer.do!r} to a node that asked in")
    return answer
