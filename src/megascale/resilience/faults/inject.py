"""Injects faults into a running job: from outside by signals, limits, routes and files, or by the trainer itself.

A trainer looks for requested faults (train/injected_faults.py) only if `resilience.faults = true` in the run's
configuration. Each injection reports its effect and the process.
"""

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
from megascale.core.atomic_files import write_atomically
from megascale.core.calls import read_calls
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.observe.hang.evidence import read_process_state
from megascale.resilience.agent.node_folder import end_checkpoint_services
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.contact import read_contact

Target = Literal["rank", "node", "run"]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        target: a rank, a node or the whole run.
        is_in_trainer: the trainer injects the fault into itself.
        expected_response: reaction that the driver should show.
    """

    kind: str
    target: Target
    is_in_trainer: bool
    effect: str
    expected_response: str


# Values of Fault.is_in_trainer.
_INSIDE = True
_OUTSIDE = False

_FAULTS = (
    Fault("kill-rank", "rank", _OUTSIDE, "SIGKILL to a trainer", "retry within a second"),
    Fault("stop-rank", "rank", _OUTSIDE, "SIGSTOP to a trainer (SIGCONT after --seconds)", "hang: rank stopped"),
    Fault("segfault", "rank", _INSIDE, "a trainer reads address 0", "segmentation fault, retry"),
    Fault("exception", "rank", _INSIDE, "a KeyError in a trainer", "retry; a repetition stops for a person"),
    Fault("out-of-memory", "rank", _INSIDE, "a trainer allocates an exbibyte", "out of memory, retry"),
    Fault("full-disk", "run", _OUTSIDE, "no trainer's file may grow beyond 4 KiB", "disk full; again: a person"),
    Fault("nan-gradient", "rank", _INSIDE, "one gradient becomes NaN", "the step is skipped, an alert"),
    Fault("flip-weight", "rank", _INSIDE, "a mantissa bit of a weight flips", "checksum mismatch within a step"),
    Fault("flip-update", "rank", _INSIDE, "an update writes wrong bits", "replay mismatch if the step is checked"),
    Fault("slow-rank", "rank", _INSIDE, "a trainer computes --seconds longer per step", "slow node, evicted"),
    Fault("slow-compute", "rank", _INSIDE, "--seconds more GEMMs per step in a rank's forwards", "slow rank, an alert"),
    Fault("leak-objects", "rank", _INSIDE, "a trainer leaks Python objects", "longer garbage collections: decline"),
    Fault("half-checkpoint", "rank", _INSIDE, "a trainer dies while it saves", "retry from the commit before"),
    Fault("mismatch", "rank", _INSIDE, "a trainer makes an extra collective call", "hang: mismatched collective"),
    Fault("missing-send", "rank", _INSIDE, "a trainer omits a send", "hang: missing send"),
    Fault("dead-reader", "rank", _INSIDE, "a trainer's reader stops", "hang: no samples"),
    Fault("spin", "rank", _INSIDE, "a trainer computes forever", "hang: busy rank"),
    Fault("kill-agent", "node", _OUTSIDE, "SIGKILL to an agent; its trainers die with it", "agent started again"),
    Fault("kill-node", "node", _OUTSIDE, "a node's agent is killed and cannot restart", "a spare takes over"),
    Fault("flapping-node", "node", _OUTSIDE, "a node's agent is killed three times", "evicted at the third"),
    Fault("kill-driver", "run", _OUTSIDE, "SIGKILL to the driver", "training continues; launch again takes over"),
    Fault("redis-loss", "run", _OUTSIDE, "the Redis server of the rendezvous ends", "training continues"),
    Fault("partition", "node", _OUTSIDE, "packets to a node's agent are dropped", "an alert while its ranks train"),
    Fault("slow-link", "node", _OUTSIDE, "the run's network is slowed down", "slower steps, an alert"),
)
FAULTS = {fault.kind: fault for fault in _FAULTS}
_FLAP_COUNT = 3  # kills of a flapping node's agent
_FLAP_INTERVAL = 5.0  # seconds between kills
_RESTART_TIMEOUT = 60.0  # seconds for a flapping node's agent to be started again
_FILE_LIMIT = 4096  # bytes that a file may have on a "full disk"


@dataclass(frozen=True)
class Options:
    """Parameters of an injection.

    Attributes:
        rank, node: the target. A fault of a trainer with a node instead of a rank affects all ranks of the node.
        seconds: duration of a fault from outside, or additional time per step of a slow trainer.
        step: first step in which a trainer injects the fault, 0: its next step.
        persistent: whether the trainer also injects the fault in every later step.
        group: group of the collective calls that a fault affects.
    """

    rank: int | None = None
    node: str | None = None
    seconds: float | None = None
    step: int = 0
    persistent: bool = False
    group: str = "data_reduce"


def inject(run: Path, kind: str, options: Options | None = None) -> list[str]:
    """Inject a fault; return one sentence per effect.

    Raises:
        ConfigError: the kind is unknown, the rank or node is missing, or the run does not allow faults.
        DataError: `run` is not a run folder.
        TrainingError: the process has ended, or this machine does not permit the injection.
    """
    options = options or Options()
    if kind not in FAULTS:
        raise ConfigError(f"there is no fault {kind!r}; `megascale faults list` names all {len(FAULTS)}")
    fault = FAULTS[kind]
    if not (run / "config.toml").exists():
        raise DataError(f"{run} is not a run folder (it has no config.toml); runs are folders such as runs/stdlib")
    if fault.target == "rank" and options.rank is None and options.node is None:
        raise ConfigError(f"{kind} is injected into one rank: name it with --rank N")
    if fault.target == "node" and options.node is None:
        raise ConfigError(f"{kind} is injected into one node: name it with --node NAME; `megascale nodes` lists nodes")
    if fault.is_in_trainer:
        return _request_from_trainer(run, kind, options)
    return _INJECTIONS_OUTSIDE[kind](run, options)


def _request_from_trainer(run: Path, kind: str, options: Options) -> list[str]:
    """Write a request for a trainer into the run folder; return one sentence per effect."""
    limits = configuration.load_written(run / "config.toml").resilience
    if not limits.faults:
        raise ConfigError(
            f"{kind} is injected by the trainer itself, which looks for faults only with resilience.faults=true; start "
            "the run with --resilience.faults=true (never for a run that matters)"
        )
    folder = run / "faults"
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:6]}"
    write_atomically(folder / f"{name}.json", json.dumps({"kind": kind, **dataclasses.asdict(options)}))
    if options.node is None:
        ranks = f"rank {options.rank}"
    else:
        ranks = f"every rank of {options.node}"
    step = f"step {options.step}" if options.step else "its next step"
    effects = [f"{ranks} injects {kind} into itself at {step}"]
    if kind == "flip-weight" and not limits.checksum_interval:
        effects.append(
            "the flip will not be detected: checksums of weights are off (resilience.checksum_interval=0); "
            "start the run with --resilience.checksum_interval=1"
        )
    if kind == "flip-update" and limits.replay_interval == 0:
        effects.append(
            "the flip will not be detected: updates are not recomputed (resilience.replay_interval=0); "
            "start the run with --resilience.replay_interval=1"
        )
    if kind == "flip-update" and limits.replay_interval == "auto":
        effects.append(
            "the flip is detected only if the start-up line `active: replay` names an interval "
            "(resilience.replay_interval=auto); start the run with --resilience.replay_interval=1"
        )
    return effects


# processes ----------------------------------------------------------------------------------------------------------


def find_rank_process(run: Path, options: Options) -> int:
    """Return the process id of `options.rank`. Raises TrainingError if the rank does not run on this host."""
    if options.rank is None:
        raise ConfigError("name the rank with --rank N")
    file = run / "status" / f"rank-{options.rank}.calls"
    record = read_calls(file, history=False)
    # The process must have mapped the file, since another process may have its number by now.
    if record is None or read_process_state(record.pid, str(file.resolve())) not in ("running", "stopped"):
        raise TrainingError(
            f"rank {options.rank} of {run} has no living process on this host; `megascale hang {run}` shows all"
        )
    return record.pid


def find_agent_process(run: Path, node: str) -> int:
    """Return the process id of a node's agent. Raises TrainingError if the agent does not run on this host."""
    try:
        state = json.loads((run / "nodes" / node / "agent.json").read_text())
        pid = int(state["pid"])
        birth = state["born"]
    except (OSError, ValueError, KeyError, TypeError):
        names = sorted(path.name for path in (run / "nodes").glob("*"))
        raise TrainingError(f"{run} has no agent on a node {node!r}; nodes: {', '.join(names) or 'none'}") from None
    if read_birth_time(pid) != birth:
        raise TrainingError(f"the agent of {node} (process {pid}) has ended")
    return pid


def _send_signal(pid: int, signal_number: signal.Signals, process_name: str) -> list[str]:
    """Send a signal and return its description as the only effect."""
    os.kill(pid, signal_number)
    return [f"{signal_number.name} to process {pid}, {process_name}"]


def _kill_rank(run: Path, options: Options) -> list[str]:
    return _send_signal(find_rank_process(run, options), signal.SIGKILL, f"rank {options.rank}")


def _stop_rank(run: Path, options: Options) -> list[str]:
    pid = find_rank_process(run, options)
    effects = _send_signal(pid, signal.SIGSTOP, f"rank {options.rank}")
    if options.seconds:
        time.sleep(options.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            effects.append(f"SIGCONT after {options.seconds:g} s")
    return effects


def _fill_disk(run: Path, options: Options) -> list[str]:
    """Limit the file size of `options.rank`, or of all ranks on this host."""
    if options.rank is not None:
        ranks = [options.rank]
    else:
        ranks = sorted(int(path.stem.partition("-")[2]) for path in (run / "status").glob("rank-*.calls"))
    effects = []
    for rank in ranks:
        with contextlib.suppress(TrainingError):
            pid = find_rank_process(run, Options(rank=rank))
            _, hard_limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT, hard_limit))
            effects.append(f"process {pid}, rank {rank}, can write no file beyond {_FILE_LIMIT} bytes")
    if not effects:
        raise TrainingError(f"no rank of {run} has a living process on this host")
    return effects


def _kill_agent(run: Path, options: Options) -> list[str]:
    return _send_signal(find_agent_process(run, str(options.node)), signal.SIGKILL, f"agent of {options.node}")


def _kill_node(run: Path, options: Options) -> list[str]:
    """Kill an agent and the node's checkpoint services, and forbid the start of another agent by a marker file."""
    pid = find_agent_process(run, str(options.node))
    node = str(options.node)
    down = run / "nodes" / node / "down"
    down.touch()
    os.kill(pid, signal.SIGKILL)
    effects = [f"{node} is down: process {pid} killed, and no agent can be started while {down} exists"]
    for service in end_checkpoint_services(run, node):
        effects.append(f"its memory is lost: checkpoint service {service} killed")
    return effects


def _flap_node(run: Path, options: Options) -> list[str]:
    """Kill a node's agent repeatedly, each time after it was started again."""
    effects = _kill_agent(run, options)
    for _ in range(_FLAP_COUNT - 1):  # The first kill is done.
        time.sleep(_FLAP_INTERVAL if options.seconds is None else options.seconds)
        deadline = time.monotonic() + _RESTART_TIMEOUT
        while True:
            try:
                effects += _kill_agent(run, options)
                break
            except TrainingError:
                if time.monotonic() > deadline:
                    return effects  # The node was evicted, which is the expected response.
                time.sleep(0.1)
    return effects


def _kill_driver(run: Path, options: Options) -> list[str]:
    pid = read_contact(run).pid
    if read_process_state(pid) == "gone":
        raise TrainingError(f"the driver of {run} (process {pid}) has ended")
    return _send_signal(pid, signal.SIGKILL, "the driver")


# networks -----------------------------------------------------------------------------------------------------------


def _end_redis(run: Path, options: Options) -> list[str]:
    """Order the run's Redis server to end, by commands in its wire format (RESP arrays of strings)."""
    url = urlsplit(configuration.load_written(run / "config.toml").rendezvous.url)
    if not url.scheme.startswith("redis"):
        raise ConfigError(f"{run} does not use Redis (rendezvous.url={url.geturl()})")
    commands = [["SHUTDOWN", "NOSAVE"]]
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is not None:
        commands.insert(0, ["AUTH", password])
    with socket.create_connection((url.hostname or "127.0.0.1", url.port or 6379), timeout=5) as connection:
        for command in commands:
            encoded = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{encoded}".encode())
            answer = connection.recv(200)
            if answer.startswith(b"-"):
                raise TrainingError(f"the Redis server refused: {answer.decode(errors='replace').strip()}")
    return [f"the Redis server at {url.hostname}:{url.port} was ordered to end without saving"]


def _make_namespace_prefix(run: Path) -> str:
    """Return a command prefix that enters the network namespace of the run's driver, which its ranks share.

    Raises TrainingError if the driver is in the namespace of this command or of the machine's first process.
    """
    pid = read_contact(run).pid
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        raise TrainingError("`ip` and `nsenter` (iproute2, util-linux) are needed to break a network and are missing")
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/net")
        machine_namespaces = {os.readlink("/proc/self/ns/net")}
        with contextlib.suppress(PermissionError):  # A container forbids this.
            machine_namespaces.add(os.readlink("/proc/1/ns/net"))
    except OSError as error:
        raise TrainingError(f"the driver's network namespace cannot be read: {error.strerror}; run as root") from None
    if namespace in machine_namespaces:
        raise TrainingError(
            "the run shares the network of this command, and a fault would break both; start the run in a network "
            "namespace of its own: unshare --net sh -c 'ip link set lo up && megascale launch ...'"
        )
    return f"nsenter --net=/proc/{pid}/ns/net"


def _find_node_address(run: Path, options: Options) -> str:
    """Return the node's address, from the command line of its agent."""
    command_line = Path(f"/proc/{find_agent_process(run, str(options.node))}/cmdline").read_bytes()
    arguments = command_line.decode().split("\0")
    return arguments[arguments.index("--address") + 1]


def _run_command(command: str) -> None:
    """Run a command without a shell. Raises TrainingError if it fails."""
    result = subprocess.run(command.split(), capture_output=True, text=True)
    if result.returncode:
        raise TrainingError(f"this machine does not permit `{command}`: {result.stderr.strip()[:200]}")


def _run_for_duration(options: Options, begin: str, end: str) -> list[str]:
    """Run the command `begin`, and after the options' seconds the command `end`. Without seconds the fault lasts."""
    _run_command(begin)
    effects = [begin]
    if options.seconds:
        time.sleep(options.seconds)
        _run_command(end)
        effects.append(f"ended after {options.seconds:g} s")
    else:
        effects.append(f"lasts until: {end}")
    return effects


def _partition_node(run: Path, options: Options) -> list[str]:
    """Drop packets to a node's address by a route in the table "local", which is searched first."""
    prefix = _make_namespace_prefix(run)
    route = f"blackhole {_find_node_address(run, options)}/32 table local"
    return _run_for_duration(options, f"{prefix} ip route add {route}", f"{prefix} ip route del {route}")


def _slow_network(run: Path, options: Options) -> list[str]:
    """Slow down the loopback device of the run's namespace, over which all its processes communicate."""
    prefix = f"{_make_namespace_prefix(run)} tc qdisc"
    add = f"{prefix} add dev lo root"
    delete = f"{prefix} del dev lo root"
    try:
        return _run_for_duration(options, f"{add} netem delay 100ms", delete)
    except TrainingError:  # A kernel without netem gets less bandwidth instead of a delay.
        return _run_for_duration(options, f"{add} tbf rate 8mbit burst 128kb latency 2s", delete)


# Functions that inject a fault from outside, by kind.
_INJECTIONS_OUTSIDE: dict[str, Callable[[Path, Options], list[str]]] = {
    "kill-rank": _kill_rank,
    "stop-rank": _stop_rank,
    "full-disk": _fill_disk,
    "kill-agent": _kill_agent,
    "kill-node": _kill_node,
    "flapping-node": _flap_node,
    "kill-driver": _kill_driver,
    "redis-loss": _end_redis,
    "partition": _partition_node,
    "slow-link": _slow_network,
}
