"""Start-up over TCPStore and over Redis on real GPUs, and whether a Redis store slows training steps.

To be run on a GPU host, in under two minutes:

    PYTHONPATH=src:. python tests/gpu/start_up.py --redis-server PATH --out start_up.json

For each store, twice in turn: N processes start, make and warm the groups of a 3D layout over NCCL, run steps of
GEMMs and collectives, and leave. Reported: seconds by phase, milliseconds a step, how often torch's
threads called into the store meanwhile and how long they held it. Then three ends that must not hang: a rank that
leaves without shutdown, a rank that is killed while the others wait for it, and a server restarted during steps.
`--device cpu` runs the same with gloo. It ends with 1 if a rank hangs or ends in another way than it should, or if keys
stay in the store.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.command_line import make_parser

if TYPE_CHECKING:
    from megascale.config import Config

LIMIT = 60  # seconds for any set of processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# One rank

WATCHED = ("set", "get", "add", "wait", "check", "compare_set", "deleteKey", "append", "multi_get", "multi_set")


def load_settings(url: str, world: int) -> Config:
    """Return the configuration of a 3D layout of `world` ranks on a store."""
    from megascale.config import load

    tensor, pipeline = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 2)}.get(world, (1, 1))
    return load(
        overrides=[
            f"rendezvous.url={url}",
            "rendezvous.timeout=30",
            "rendezvous.group_timeout=20",
            f"parallel.tensor={tensor}",
            f"parallel.pipeline={pipeline}",
            f"parallel.virtual_stages={2 if pipeline > 1 else 1}",
            "model.tied_embeddings=true",
            "train.name=gpu-start-up",
        ]
    )


class Calls:
    """Counts what goes to a Redis store, by thread and kind, and the time it takes."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.seconds = 0.0
        self.keys: list[str] = []
        from megascale.plugins.redis.redis_store import RedisStore

        for name in WATCHED:
            setattr(RedisStore, name, self._counting(name, getattr(RedisStore, name)))

    def _counting(self, name: str, real: Any) -> Any:
        def call(store: Any, *arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(store, *arguments)
            finally:
                self.seconds += time.perf_counter() - began
                where = "main" if threading.current_thread() is threading.main_thread() else "background"
                self.count[f"{where} {name}"] = self.count.get(f"{where} {name}", 0) + 1
                if arguments:
                    self.keys.append(
                        f"{name} {arguments[0] if isinstance(arguments[0], str) else list(arguments[0])[:2]}"
                    )

        return call

    def take(self) -> dict[str, Any]:
        """Return the records since the last call."""
        result = {"calls": self.count, "seconds": round(self.seconds, 4), "keys": self.keys[:60]}
        self.count = {}
        self.seconds = 0.0
        self.keys = []
        return result


def work(arguments: argparse.Namespace) -> None:
    """One rank: start, steps, leave; writes what it saw."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    began = time.perf_counter()
    import torch
    import torch.distributed as dist

    from megascale.rendezvous.groups import shutdown
    from megascale.rendezvous.start_job import initialise

    if arguments.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.ones(1, device=device).sum().item()  # the context, which is not the store's matter
    observed: dict[str, Any] = {"rank": rank, "import and device": time.perf_counter() - began}
    redis = arguments.url.startswith("redis")
    calls = Calls() if redis else None
    began = time.perf_counter()
    groups = initialise(load_settings(arguments.url, world), rank=rank, world=world, local_rank=rank, device=device)
    observed["start"] = time.perf_counter() - began
    observed["phases"] = groups.timings
    if calls:
        observed["calls at start"] = calls.take()
    if arguments.end == "lost" and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = False
    try:
        observed["steps"] = steps(groups, device, arguments)
        if calls:
            observed["calls in steps"] = calls.take()
    except (RuntimeError, dist.DistError) as error:
        failed = True
        observed["lost"] = str(error).splitlines()[0][:200]
    if arguments.end == "no shutdown" and not failed:
        Path(arguments.answer, f"{rank}.json").write_text(json.dumps(observed))
        sys.exit(0)
    began = time.perf_counter()
    shutdown(groups, failed=failed)
    observed["shutdown"] = time.perf_counter() - began
    Path(arguments.answer, f"{rank}.json").write_text(json.dumps(observed))


def steps(groups: Any, device: Any, arguments: argparse.Namespace) -> dict[str, float]:
    """Steps of GEMMs, collectives of each kind and host work in Python, as training has them."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    size = 4096 if cuda else 128
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    flat = torch.randn(1 << (24 if cuda else 14), device=device)
    times = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        for _ in range(8):
            b = a @ a
            if "tensor" in groups.by_kind:
                dist.all_reduce(b, group=groups.by_kind["tensor"])
            sum(range(2000))  # Python that holds the interpreter
        for kind in ("data_reduce", "model", "stage"):
            if kind in groups.by_kind:
                dist.all_reduce(flat, group=groups.by_kind[kind])
        p2p_channels(groups, a)
        # As training does: a flag of the world, read on the host.
        flag = torch.zeros(1, device=device)
        if groups.grid.world_size > 1:
            dist.all_reduce(flag)
        assert float(flag) == 0.0
        times.append(time.perf_counter() - began)
        flat.zero_()
        if step == 20 and groups.rank == 0:
            Path(arguments.answer, "stepping").touch()
    retained = sorted(times[10:])
    ms = {
        "mean": statistics.fmean(retained),
        "median": retained[len(retained) // 2],
        "p99": retained[int(len(retained) * 0.99)],
    }
    return {name: 1e3 * value for name, value in ms.items()}


def p2p_channels(groups: Any, tensor: Any) -> None:
    """A transfer on every lane."""
    import torch
    import torch.distributed as dist

    handles, locations = [], []
    for (use, _), channel in groups.p2p.items():
        if use.startswith("send_"):
            handles.append(dist.isend(tensor, channel.peer, group=channel.group))
        else:
            locations.append(torch.empty_like(tensor))
            handles.append(dist.irecv(locations[-1], channel.peer, group=channel.group))
    for handle in handles:
        if handle is not None:  # torch returns None to a rank outside of the group
            handle.wait()


# All ranks


def run(arguments: argparse.Namespace, url: str, end: str = "", steps: int = 0, restart: Any = None) -> dict[str, Any]:
    """N ranks on one store; what they saw, and how they ended."""
    with tempfile.TemporaryDirectory() as answer:
        common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(arguments.ranks), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        argv = [sys.executable, __file__, "--worker", "--url", url, "--answer", answer, "--end", end]
        argv += ["--device", arguments.device, "--steps", str(steps or arguments.steps)]
        logs = [open(Path(answer, f"{rank}.log"), "w+") for rank in range(arguments.ranks)]  # noqa: SIM115
        began = time.perf_counter()
        ranks = [
            subprocess.Popen(
                argv, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=logs[r], stderr=subprocess.STDOUT
            )
            for r in range(arguments.ranks)
        ]
        if restart is not None:
            while not Path(answer, "stepping").exists() and time.perf_counter() - began < LIMIT:
                time.sleep(0.01)
            restart()
        hung = []
        for rank, process in enumerate(ranks):
            try:
                process.wait(max(0.1, LIMIT - (time.perf_counter() - began)))
            except subprocess.TimeoutExpired:
                hung.append(rank)
                process.kill()
                process.wait()
        full = time.perf_counter() - began
        observed = {
            r: json.loads(Path(answer, f"{r}.json").read_text())
            for r in range(arguments.ranks)
            if Path(answer, f"{r}.json").exists()
        }
        output = {}
        for rank, log in enumerate(logs):
            log.seek(0)
            output[rank] = log.read()[-1500:]
            log.close()
        codes = [process.returncode for process in ranks]
        bad = {rank: output[rank] for rank in output if codes[rank] != 0 or rank in hung}
        return {"seconds": full, "exit codes": codes, "hung": hung, "ranks": observed, "logs": bad}


class Redis:
    """A redis-server on loopback."""

    def __init__(self, program: str) -> None:
        self.program, self.port = program, free_port()
        self.start()

    def start(self) -> None:
        arguments = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([self.program] + arguments, stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"{self.program} does not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def keys(self) -> int:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(b"DBSIZE\r\n")
            return int(link.recv(100).strip(b":\r\n"))


def main() -> int:
    """Print the starts and ends; 1 if one is not as it should be."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="default: the host's GPUs")
    parser.add_argument("--steps", type=int, default=300, help="steps of each start")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--redis-server", default="redis-server", help="program of the Redis server")
    parser.add_argument("--out", default="start_up.json", help="file for the results as JSON")
    parser.add_argument("--url", default="env://", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--end", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    import torch

    arguments.ranks = arguments.ranks or torch.cuda.device_count() or 2
    redis = Redis(arguments.redis_server)
    url = f"redis://127.0.0.1:{redis.port}"
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "cpu"
    record: dict[str, Any] = {"device": f"{arguments.ranks} x {name}", "torch": torch.__version__, "runs": []}
    try:
        for turn in range(2):
            for store, location in (("tcp", "env://"), ("redis", url)):
                result = run(arguments, location) | {"store": store, "turn": turn, "keys left": redis.keys()}
                record["runs"].append(result)
                report(result)
        for end in ("no shutdown", "lost"):
            result = run(arguments, url, end, steps=50) | {"store": "redis", "end": end}
            record["runs"].append(result)
            report(result)
        result = run(arguments, url, steps=100, restart=redis.restart) | {"store": "redis", "end": "server restarted"}
        result["keys left"] = redis.keys()
        record["runs"].append(result)
        report(result)
    finally:
        redis.stop()
        Path(arguments.out).write_text(json.dumps(record, indent=1))
    best = {
        store: [r for r in record["runs"] if r["store"] == store and "end" not in r and r["ranks"]]
        for store in ("tcp", "redis")
    }
    for store, runs in best.items():
        if not runs:
            print(f"no run over {store} has started: see the logs above")
            continue
        start = min(max(rank["start"] for rank in r["ranks"].values()) for r in runs)
        step = min(r["ranks"][0]["steps"]["median"] for r in runs if 0 in r["ranks"])
        print(f"BEST {store}: start {start:.3f} s, median step {step:.3f} ms")
    faults = [fault for result in record["runs"] for fault in find_faults(result)]
    for fault in faults:
        print(f"! {fault}")
    return int(bool(faults))


def find_faults(result: dict[str, Any]) -> list[str]:
    """Return a phrase per rank that has hung or ended in another way than it should, and for keys in the store."""
    end = result.get("end", "")
    subject = f"{result['store']} {end}".strip()
    codes = result["exit codes"]
    faults = [f"{subject}: rank {rank} hangs" for rank in result["hung"]]
    for rank, code in enumerate(codes):
        expected = 0
        if end == "lost" and rank == len(codes) - 1:
            expected = -signal.SIGKILL
        if code != expected and rank not in result["hung"]:
            faults.append(f"{subject}: rank {rank} ended with {code} instead of {expected}")
    if result.get("keys left"):
        faults.append(f"{subject}: {result['keys left']} keys stay in the store")
    return faults


def report(result: dict[str, Any]) -> None:
    ranks = result["ranks"].values()
    starts = [f"{rank['start']:.3f}" for rank in ranks]
    step = [f"{rank['steps']['median']:.3f}/{rank['steps']['p99']:.3f}" for rank in ranks if "steps" in rank]
    print(f"{result['store']:6} {result.get('end', ''):17} start s {starts} step ms median/p99 {step}", end=" ")
    print(f"codes {result['exit codes']} hung {result['hung']} whole {result['seconds']:.1f} s", end=" ")
    print(f"keys left {result.get('keys left', '-')}")
    for rank in list(ranks)[:1]:
        print("   phases ms:", {name: round(1e3 * seconds) for name, seconds in rank["phases"].items()})
        for when in ("calls at start", "calls in steps"):
            if when in rank:
                print(f"   {when}:", rank[when]["calls"], f"{rank[when]['seconds']} s")
        if "lost" in rank:
            print("   lost:", rank["lost"], f"shutdown {rank['shutdown']:.2f} s")
    for rank, text in list(result["logs"].items())[:2]:
        print(f"   rank {rank} said: ...{text[-400:]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
