"""A rank that loses its peer aborts its communicators, keeps its state, and meets a new peer in the same process.

Two GPUs, about a minute; it ends by itself:

    python -m tests.gpu.abort

Rank 0 queues collectives on all groups, one of them from a CUDA graph, and an update after them. Rank 1 is killed
before it takes part. A thread of rank 0 then aborts, as the order of an agent does, and a new process becomes rank 1.
At the end both connect three further groups, one after the other and at the same time.
Each line has the seconds of one part. The last line says whether the update was held back, and how the second start
compares with the first, part by part. `--device cpu` runs the same with gloo, `--no-graph` without the graph.
`--concurrent` makes the communicators of each start at the same time, and connects the ranks for exchanges of state.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from megascale import config as configuration
from megascale import torch_private
from megascale.optim.update_hold import UpdateHold
from megascale.rendezvous.group_plan import STATE_KINDS
from megascale.rendezvous.groups import Groups, abort, describe_lost_peer, shutdown
from megascale.rendezvous.start_job import initialise
from tests.gpu.command_line import make_parser

LIMIT = 75.0  # seconds for all of it
_POLL_SECONDS = 0.01  # between two looks whether rank 0 has queued its calls
SETTINGS = ["--parallel.data=2", "--model.preset=tiny", "--rendezvous.group_timeout=60"]


def main() -> int:
    """Start both ranks, replace the second one, and return rank 0's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-graph", action="store_true", help="run without a captured graph")
    parser.add_argument("--concurrent", action="store_true", help="set rendezvous.concurrent_connections")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--queued", type=Path, help=argparse.SUPPRESS)  # rank 0 makes it when its calls are queued
    inputs = parser.parse_args()
    if inputs.rank is not None:
        faulthandler.dump_traceback_later(LIMIT - 5, exit=True)
        return run_rank(inputs)
    with tempfile.TemporaryDirectory() as folder:
        inputs.queued = Path(folder) / "queued"
        return run_ranks(inputs)


def run_ranks(inputs: argparse.Namespace) -> int:
    """Start both ranks, replace the second one, and return 0 if all ended as they should."""
    ports = [find_port(), find_port()]
    first = start_rank(1, ports, inputs)
    survivor = start_rank(0, ports, inputs)
    processes = [first, survivor]
    try:
        first_code = first.wait(LIMIT)
        print(f"rank 1 ended with {first_code} (-9 is right)", flush=True)
        processes.append(start_rank(1, [ports[1], 0], inputs))
        codes = [process.wait(LIMIT) for process in processes[1:]]
    except subprocess.TimeoutExpired as error:
        print(f"not ended: {error}", flush=True)
        return 1
    finally:
        for process in processes:
            process.kill()
    print(f"exit codes {codes}", flush=True)
    return int(any(codes) or first_code != -signal.SIGKILL)


def find_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_rank(rank: int, ports: list[int], inputs: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start this file as a rank. Ports: of the first and of the second start; 0: there is no second one."""
    options = ["--rank", str(rank), "--device", inputs.device, "--ports", *map(str, ports)]
    options += ["--queued", str(inputs.queued)]
    if inputs.no_graph:
        options.append("--no-graph")
    if inputs.concurrent:
        options.append("--concurrent")
    # The variable tells the package that the process is kept; its pipe is not used here.
    environment = os.environ | {"MEGASCALE_ORDERS": "-", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-m", "tests.gpu.abort"] + options, env=environment)


def join(inputs: argparse.Namespace, port: int) -> Groups:
    """Meet the other rank, and print the seconds of the start and of the first exchange."""
    os.environ["MASTER_PORT"] = str(port)
    rank = inputs.rank
    settings = SETTINGS + [f"--rendezvous.concurrent_connections={str(inputs.concurrent).lower()}"]
    config = configuration.load(None, settings)
    groups = initialise(
        config, rank=rank, world=2, local_rank=rank, device=inputs.device, exchanges_state=inputs.concurrent
    )
    say(rank, groups.report())
    began = time.perf_counter()
    sent = torch.full((2,), float(rank), device=groups.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, [1, 1], [1, 1])
    is_right = received.tolist() == [0.0, 1.0]
    say(rank, f"first exchange in {time.perf_counter() - began:.2f} s, right: {is_right}")
    if not is_right:
        raise SystemExit(f"rank {rank} has received {received.tolist()} instead of [0.0, 1.0]")
    return groups


def say(rank: int, text: str) -> None:
    """Print a line at once."""
    print(f"rank {rank}: {text}", flush=True)


def run_rank(inputs: argparse.Namespace) -> int:
    """Run rank 0, or one of the processes that become rank 1."""
    rank, device = inputs.rank, inputs.device
    groups = join(inputs, inputs.ports[0])
    if rank == 1:
        if inputs.ports[1]:
            while not inputs.queued.exists():  # the parent ends this process after LIMIT
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(groups)
    hold = UpdateHold(groups.device)
    hold.set_step(7)
    weight = torch.ones(1 << 20, device=groups.device)
    graph = capture_call(groups) if device == "cuda" and not inputs.no_graph else None
    threading.Timer(3.0, leave, (hold, groups)).start()
    began = time.perf_counter()
    error = ""
    try:
        norm = queue_step(groups, hold, weight, graph, inputs.queued)
        norm.item()
    except RuntimeError as lost:
        error = describe_lost_peer(lost) or str(lost)[:100]
    say(
        rank,
        f"the step that its peer did not join ended after {time.perf_counter() - began:.2f} s ({error or 'no error'})",
    )
    marks = [time.perf_counter()]
    del graph
    gc.collect()
    marks.append(time.perf_counter())
    shutdown(groups, failed=True)
    marks.append(time.perf_counter())
    if device == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    is_whole = bool((weight == 1).all())
    step = hold.read_step()
    del groups
    gc.collect()
    marks.append(time.perf_counter())
    parts = [f"{b - a:.2f}" for a, b in itertools.pairwise(marks)]
    say(rank, "seconds: graphs dropped {}, groups aborted {}, device idle {}, memory freed {}".format(*parts))
    say(rank, f"state in place: {is_whole} (step {step}, must be 7)")
    hold.release()
    code = finish(join(inputs, inputs.ports[1]))
    return code if is_whole and step == 7 else 1


def capture_call(groups: Groups) -> torch.cuda.CUDAGraph:
    """Return a graph with a collective."""
    x = torch.ones(1 << 20, device=groups.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(x, group=groups.by_kind["data_reduce"])
    return graph


def queue_step(
    groups: Groups, hold: UpdateHold, weight: torch.Tensor, graph: torch.cuda.CUDAGraph | None, queued: Path
) -> torch.Tensor:
    """Queue collectives of all groups and an update that uses their results; return the update's norm.

    Make the file `queued` when the collectives are queued: on a CPU before the waits, which block.
    """
    works = []
    for kind, group in groups.by_kind.items():
        if kind in STATE_KINDS:
            continue  # they have no communicator before their first call
        x = torch.ones(1 << 22, device=groups.device)
        works.append((dist.all_reduce(x, group=group, async_op=True), x))
    if graph is not None:
        graph.replay()
    if groups.device.type == "cpu":
        queued.touch()
    total = torch.zeros((), device=groups.device)
    for work, x in works:
        work.wait()
        total += x.sum()
    packed = total.reshape(1).double()
    dist.all_reduce(packed)
    norm = hold.mask_norm(packed[0])
    weight.copy_(torch.where(torch.isfinite(norm), weight + 1, weight))
    queued.touch()
    return norm


def leave(hold: UpdateHold, groups: Groups) -> None:
    """Do what an order to leave does (`train/parking.py`)."""
    hold.request()
    began = time.perf_counter()
    abort(groups)
    say(0, f"the aborts were begun in {time.perf_counter() - began:.3f} s")


def finish(groups: Groups) -> int:
    """Check a sum over both ranks, and leave."""
    x = torch.ones(4, device=groups.device)
    for group in groups.by_kind.values():
        dist.all_reduce(x, group=group)
    expected = 2.0 ** len(groups.by_kind)
    is_right = bool((x == expected).all())
    say(groups.rank, f"sums over the new groups are right: {is_right}")
    if groups.device.type == "cuda":
        compare_connections(groups)
    shutdown(groups)
    return 0 if is_right else 1


def compare_connections(groups: Groups) -> None:
    """Print the seconds in which three communicators are made one after the other, and by a thread each.

    A rank waits in the store for a lower one only, so that the threads' waits cannot form a cycle.
    """
    for is_parallel in (False, True):
        backends = []
        for number in range(3):
            with torch_private.name_process_group(f"compared {is_parallel} {number}"):
                group = dist.new_group([0, 1], backend="nccl", use_local_synchronization=True)
            backends.append(group._get_backend(groups.device))
        dist.barrier(group=dist.group.WORLD)
        began = time.perf_counter()
        with ThreadPoolExecutor(3 if is_parallel else 1) as pool:
            list(pool.map(lambda backend: backend.eager_connect_single_device(groups.device), backends))
        manner = "at the same time" if is_parallel else "one after the other"
        say(groups.rank, f"three communicators made {manner} in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
