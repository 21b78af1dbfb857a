"""Breaks a running job on purpose: from outside (signals, limits, routes, files), or by asking the trainer itself.

What a trainer does to itself (train/injected_faults.py) needs `resilience.faults = true` in the run's configuration;
otherwise trainers never look. Every fault says what it did, to which process, and what should follow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megascale import config as configuration
from megascale.core.calls import read_calls
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.observe.hang.evidence import process_state
from megascale.resilience.agent.services import end_services
from megascale.resilience.process_birth import born
from megascale.resilience.protocol.contact import read_contact

Target = Literal["rank", "node", "run"]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: its name.
        target: what it is injected into.
        inside: whether the trainer does it to itself.
        does: what happens, in words.
        follows: what the driver should make of it.
    """

    kind: str
    target: Target
    is_in_trainer: bool
    effect: str
    expected_response: str


FAULTS = {
    fault.kind: fault
    for fault in (
        Fault("kill-rank", "rank", False, "SIGKILL to a trainer", "retry within a second"),
        Fault("stop-rank", "rank", False, "SIGSTOP to a trainer (SIGCONT after --seconds)", "hang: rank stopped"),
        Fault("segfault", "rank", True, "a trainer reads address 0", "segmentation fault, retry"),
        Fault("exception", "rank", True, "a KeyError in a trainer", "retry; the same again stops for a person"),
        Fault("out-of-memory", "rank", True, "a trainer asks for an exbibyte", "out of memory, retry"),
        Fault("full-disk", "run", False, "no trainer's file may grow beyond 4 KiB", "disk full; again: a person"),
        Fault("nan-gradient", "rank", True, "one gradient becomes NaN", "the step is skipped, an alert"),
        Fault("flip-weight", "rank", True, "a mantissa bit of a weight flips", "checksum mismatch within a step"),
        Fault("slow-rank", "rank", True, "a trainer computes --seconds longer a step", "slow node, evicted"),
        Fault(
            "slow-compute", "rank", True, "a rank's forwards get --seconds more of GEMMs a step", "slow rank, an alert"
        ),
        Fault("leak-objects", "rank", True, "a trainer leaks Python objects", "longer garbage collections: decline"),
        Fault("half-checkpoint", "rank", True, "a trainer dies while it saves", "retry from the commit before"),
        Fault("mismatch", "rank", True, "a trainer makes a collective too many", "hang: mismatched collective"),
        Fault("missing-send", "rank", True, "a trainer leaves out a send", "hang: missing send"),
        Fault("dead-reader", "rank", True, "a trainer's reader stops", "hang: no samples"),
        Fault("spin", "rank", True, "a trainer computes for ever", "hang: busy rank"),
        Fault("kill-agent", "node", False, "SIGKILL to an agent; its trainers die with it", "agent started again"),
        Fault("kill-node", "node", False, "a node's agent is killed and cannot come back", "a spare takes over"),
        Fault("flapping-node", "node", False, "a node's agent is killed three times", "evicted at the third"),
        Fault("kill-driver", "run", False, "SIGKILL to the driver", "training goes on; launch again takes over"),
        Fault("redis-loss", "run", False, "the Redis server of the rendezvous ends", "training goes on"),
        Fault("partition", "node", False, "packets to a node's address are dropped", "missed heartbeats, replaced"),
        Fault("slow-link", "node", False, "the run's network is slowed down", "slower steps, an alert"),
    )
}
_FLAPS = 3
_FILE_LIMIT = 4096


@dataclass(frozen=True)
class Options:
    """Where and how: rank or node, seconds, and the first step in which a trainer injects it (0: the next)."""

    rank: int | None = None
    node: str | None = None
    seconds: float | None = None
    step: int = 0
    persistent: bool = False
    group: str = "data_reduce"


def inject(run: Path, kind: str, options: Options | None = None) -> list[str]:
    """Inject a fault. Returns what was done, a sentence each.

    Raises:
        ConfigError: no such kind, a rank or node that is missing, or a run that does not allow faults.
        DataError: `run` is no run folder.
        TrainingError: the process is not there, or this machine does not permit it.
    """
    options = options or Options()
    if kind not in FAULTS:
        raise ConfigError(f"there is no fault {kind!r}; `megascale faults list` names all {len(FAULTS)}")
    fault = FAULTS[kind]
    if not (run / "config.toml").exists():
        raise DataError(f"{run} is not a run folder (it has no config.toml); runs are folders such as runs/stdlib")
    if fault.target == "rank" and options.rank is None and options.node is None:
        raise ConfigError(f"{kind} is injected into one rank: say which with --rank N")
    if fault.target == "node" and options.node is None:
        raise ConfigError(f"{kind} is injected into one node: say which with --node NAME; `megascale nodes` names them")
    if fault.is_in_trainer:
        return _ask_trainer(run, kind, options)
    outside: dict[str, Callable[[Path, Options], list[str]]] = {
        "kill-rank": _kill_rank,
        "stop-rank": _stop_rank,
        "full-disk": _full_disk,
        "kill-agent": _kill_agent,
        "kill-node": _kill_node,
        "flapping-node": _flap,
        "kill-driver": _kill_driver,
        "redis-loss": _redis_loss,
        "partition": _partition,
        "slow-link": _slow_link,
    }
    return outside[kind](run, options)


def _ask_trainer(run: Path, kind: str, options: Options) -> list[str]:
    config = configuration.load(run / "config.toml", keep_unknown_parts=True)
    if not config.resilience.faults:
        raise ConfigError(
            f"{kind} is done by the trainer itself, which looks for faults only with resilience.faults=true; start the "
            "run with --resilience.faults=true (never for a run that matters)"
        )
    folder = run / "faults"
    folder.mkdir(exist_ok=True)
    fault = {"kind": kind, **dataclasses.asdict(options)}
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:6]}"
    temporary = folder / f"{name}.tmp"
    temporary.write_text(json.dumps(fault))
    os.replace(temporary, folder / f"{name}.json")
    who = f"rank {options.rank}" if options.node is None else f"every rank of {options.node}"
    done = [f"{who} injects {kind} into itself at " + (f"step {options.step}" if options.step else "its next step")]
    if kind == "flip-weight" and not config.resilience.checksum_interval:
        done.append(
            "nothing will notice it: checksums of weights are off (resilience.checksum_interval=0); "
            "start the run with --resilience.checksum_interval=1"
        )
    return done


# processes ----------------------------------------------------------------------------------------------------------


def pid_of(run: Path, rank: int) -> int:
    """The process of a rank on this host; TrainingError if it does not live here."""
    file = run / "status" / f"rank-{rank}.calls"
    record = read_calls(file, history=False)
    if record is None or process_state(record.pid, str(file.resolve())) not in ("running", "stopped"):
        raise TrainingError(
            f"rank {rank} of {run} has no living process on this host; `megascale hang {run}` shows all"
        )
    return record.pid


def _ranks(run: Path) -> list[int]:
    return sorted(int(p.stem.partition("-")[2]) for p in (run / "status").glob("rank-*.calls"))


def _rank(options: Options) -> int:
    if options.rank is None:
        raise ConfigError("say which rank with --rank N")
    return options.rank


def _kill_rank(run: Path, options: Options) -> list[str]:
    pid = pid_of(run, _rank(options))
    os.kill(pid, signal.SIGKILL)
    return [f"SIGKILL to process {pid}, rank {options.rank}"]


def _stop_rank(run: Path, options: Options) -> list[str]:
    pid = pid_of(run, _rank(options))
    os.kill(pid, signal.SIGSTOP)
    said = [f"SIGSTOP to process {pid}, rank {options.rank}"]
    if options.seconds:
        time.sleep(options.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            said.append(f"SIGCONT after {options.seconds:g} s")
    return said


def _full_disk(run: Path, options: Options) -> list[str]:
    ranks = _ranks(run) if options.rank is None else [options.rank]
    said = []
    for rank in ranks:
        with contextlib.suppress(TrainingError):
            pid = pid_of(run, rank)
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard))
            said.append(f"process {pid}, rank {rank}, can write no file beyond {_FILE_LIMIT} bytes")
    if not said:
        raise TrainingError(f"no rank of {run} has a living process on this host")
    return said


def agent_pid(run: Path, node: str) -> int:
    """The process of a node's agent on this host; TrainingError if there is none."""
    try:
        state = json.loads((run / "nodes" / node / "agent.json").read_text())
        pid, birth = int(state["pid"]), state["born"]
    except (OSError, ValueError, KeyError, TypeError):
        names = sorted(p.name for p in (run / "nodes").glob("*")) if (run / "nodes").is_dir() else []
        raise TrainingError(f"{run} has no agent on a node {node!r}; nodes: {', '.join(names) or 'none'}") from None
    if born(pid) != birth:
        raise TrainingError(f"the agent of {node} (process {pid}) has ended")
    return pid


def _node(options: Options) -> str:
    if options.node is None:
        raise ConfigError("say which node with --node NAME")
    return options.node


def _kill_agent(run: Path, options: Options) -> list[str]:
    pid = agent_pid(run, _node(options))
    os.kill(pid, signal.SIGKILL)
    return [f"SIGKILL to process {pid}, agent of {options.node}"]


def _kill_node(run: Path, options: Options) -> list[str]:
    pid = agent_pid(run, _node(options))
    down = run / "nodes" / _node(options) / "down"
    down.touch()
    os.kill(pid, signal.SIGKILL)
    services = end_services(run, _node(options))
    said = [f"{options.node} is down: process {pid} killed, and none can be started while {down} exists"]
    return said + [f"its memory is lost: checkpoint service {service} killed" for service in services]


def _flap(run: Path, options: Options) -> list[str]:
    said = []
    for number in range(_FLAPS):
        deadline = time.monotonic() + 60
        while True:
            try:
                said += _kill_agent(run, options)
                break
            except TrainingError:
                if number == 0 or time.monotonic() > deadline:
                    # Evicted meanwhile: that is the point of it.
                    return said if said else _kill_agent(run, options)
                time.sleep(0.1)
        if number + 1 < _FLAPS:
            time.sleep(options.seconds if options.seconds is not None else 5.0)
    return said


def _kill_driver(run: Path, options: Options) -> list[str]:
    contact = read_contact(run)
    if process_state(contact.pid) == "gone":
        raise TrainingError(f"the driver of {run} (process {contact.pid}) has ended")
    os.kill(contact.pid, signal.SIGKILL)
    return [f"SIGKILL to process {contact.pid}, the driver"]


# networks -----------------------------------------------------------------------------------------------------------


def _redis_loss(run: Path, options: Options) -> list[str]:
    url = urlsplit(configuration.load(run / "config.toml", keep_unknown_parts=True).rendezvous.url)
    if not url.scheme.startswith("redis"):
        raise ConfigError(f"{run} does not use Redis (rendezvous.url={url.geturl()})")
    secret = os.environ.get(PASSWORD_VARIABLE)
    with socket.create_connection((url.hostname or "127.0.0.1", url.port or 6379), timeout=5) as link:
        words = [["SHUTDOWN", "NOSAVE"]] if secret is None else [["AUTH", secret], ["SHUTDOWN", "NOSAVE"]]
        for word in words:
            parts = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in word)
            link.sendall(f"*{len(word)}\r\n{parts}".encode())
            answer = link.recv(200)
            if answer.startswith(b"-"):
                raise TrainingError(f"the Redis server refused: {answer.decode(errors='replace').strip()}")
    return [f"the Redis server at {url.hostname}:{url.port} was ordered to end without saving"]


def _namespace(run: Path) -> list[str]:
    """Words that run a command in the network namespace of the run's driver; refused for the machine's own."""
    pid = read_contact(run).pid
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        raise TrainingError("`ip` and `nsenter` (iproute2, util-linux) are needed to break a network, and are not here")
    try:
        theirs, machines = os.readlink(f"/proc/{pid}/ns/net"), {os.readlink("/proc/self/ns/net")}
        with contextlib.suppress(PermissionError):  # a container's
            machines.add(os.readlink("/proc/1/ns/net"))
    except OSError as error:
        raise TrainingError(f"the driver's network namespace cannot be read: {error.strerror}; run as root") from None
    if theirs in machines:
        raise TrainingError(
            "the run shares the network of this command, which is not broken for a test; start it in a namespace of "
            "its own: unshare --net sh -c 'ip link set lo up && megascale launch ...'"
        )
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _address_of(run: Path, node: str) -> str:
    """The node's address, as its agent binds it."""
    words = Path(f"/proc/{agent_pid(run, node)}/cmdline").read_bytes().decode().split("\0")
    return words[words.index("--address") + 1]


def _do(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"this machine does not permit `{' '.join(words)}`: {done.stderr.strip()[:200]}")


def _for_a_while(options: Options, begin: list[str], end: list[str]) -> list[str]:
    _do(begin)
    said = [" ".join(begin)]
    if options.seconds:
        time.sleep(options.seconds)
        _do(end)
        said.append(f"ended after {options.seconds:g} s")
    else:
        said.append(f"lasts until: {' '.join(end)}")
    return said


def _partition(run: Path, options: Options) -> list[str]:
    inside = _namespace(run)
    route = ["ip", "route", "{}", "blackhole", f"{_address_of(run, _node(options))}/32", "table", "local"]
    return _for_a_while(options, [*inside, *_put(route, "add")], [*inside, *_put(route, "del")])


def _slow_link(run: Path, options: Options) -> list[str]:
    inside = _namespace(run)
    end = [*inside, "tc", "qdisc", "del", "dev", "lo", "root"]
    add = [*inside, "tc", "qdisc", "add", "dev", "lo", "root"]
    try:
        return _for_a_while(options, [*add, "netem", "delay", "100ms"], end)
    except TrainingError:  # a kernel without netem: less bandwidth in place of a delay
        return _for_a_while(options, [*add, "tbf", "rate", "8mbit", "burst", "128kb", "latency", "2s"], end)


def _put(words: list[str], verb: str) -> list[str]:
    return [verb if word == "{}" else word for word in words]
