"""All-reduce between pairs of nodes, regrouped until the bad ones are named: one process a node takes part.

Nodes meet in a store that the first one serves. It decides each round's pairs (regroup.py); a node that does not report
in time counts as failed, so a dead node is found like a slow one. Slow pairs are measured once more before that counts,
since a host may have been busy with something else. Every measurement is a process of its own, which can hang or crash
without taking the inquiry with it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megascale.core.python_command import module_command
from megascale.resilience.diagnose.check import SelfCheck
from megascale.resilience.diagnose.regroup import Inquiry, Pair, thresholds

PART = 0.5  # of the median rate of the first round that a pair must reach
_MEASURE_SECONDS = 60.0
_DEVICE_BYTES, _HOST_BYTES = 64 << 20, 8 << 20
# The best of so many all-reduces counts, for so many seconds: a node that is busy for a moment is no slow one.
_LEAST_TRIES, _TRY_SECONDS = 5, 1.0
_ROUNDS = 32  # those in which slow pairs are measured again among them

# (pair, this node, number of the round) -> GB/s; raises where it fails.
Measure = Callable[[Pair, int, int], float]


@dataclass(frozen=True)
class Findings:
    """The end of an inquiry.

    Attributes:
        bad: nodes that fail with others; links: pairs between which the way is bad; undecided: suspects without proof.
        rounds: how many rounds it took.
        rates: GB/s by pair, None where it failed.
    """

    bad: tuple[int, ...]
    links: tuple[Pair, ...]
    undecided: tuple[int, ...]
    rounds: int
    rates: dict[str, float | None]

    def to_self_check(self, node: int) -> SelfCheck:
        """What the inquiry says of one node."""
        mine = [rate for pair, rate in self.rates.items() if str(node) in pair.split("-") and rate is not None]
        name, best = "all-reduce with neighbours", max(mine, default=None)
        if node in self.bad:
            return SelfCheck(name, "failed", best, "GB/s", details=f"node {node} fails with good nodes")
        if node in self.undecided:
            return SelfCheck(name, "failed", best, "GB/s", details=f"nodes {list(self.undecided)} fail with each other")
        bad = f"; bad nodes: {list(self.bad)}" if self.bad else ""
        bad += f"; bad links: {[list(link) for link in self.links]}" if self.links else ""
        return SelfCheck(name, "passed", best, "GB/s", details=f"{self.rounds} rounds{bad}")


def take_part(store: Any, node: int, world: int, measure: Measure, seconds: float = _MEASURE_SECONDS) -> Findings:
    """Go through the rounds; every node returns the same findings.

    Args:
        store: a torch store that all nodes share.
        node: this node's number, in the order of the nodes' location; 0 leads.
        seconds: for a measurement; a node that has not reported by then has failed.
    """
    lead = _Lead(store, world, seconds) if node == 0 else None
    for number in range(_ROUNDS):
        if lead is not None:
            lead.announce(number)
        store.wait([f"round/{number}"], timedelta(seconds=4 * seconds))
        order = json.loads(store.get(f"round/{number}"))
        if "findings" in order:
            found = order["findings"]
            store.set(f"done/{node}", "1")
            if lead is not None:
                lead.part()
            links = tuple((a, b) for a, b in found["links"])
            return Findings(tuple(found["bad"]), links, tuple(found["undecided"]), number, found["rates"])
        for a, b in order["pairs"]:
            if node in (a, b):
                store.set(f"result/{number}/{node}", json.dumps(_measured(measure, (a, b), node, number)))
        if lead is not None:
            lead.collect(number)
    raise AssertionError("an inquiry ends within its rounds")


def _measured(measure: Measure, pair: Pair, node: int, number: int) -> float | None:
    try:
        return measure(pair, node, number)
    except Exception:
        return None


class _Lead:
    """Node 0's part: pairs out, results in."""

    def __init__(self, store: Any, world: int, seconds: float) -> None:
        self.store, self.world, self.seconds = store, world, seconds
        self.inquiry = Inquiry(range(world))
        self.pairs: list[Pair] = []
        self.rates: dict[str, float | None] = {}
        self.least: float | None = None
        self.slow: dict[Pair, float] = {}  # of the last round, to be measured again
        self.held: dict[Pair, float | None] = {}  # the last round's other pairs

    def announce(self, number: int) -> None:
        self.pairs = list(self.slow) or self.inquiry.next_round() if number + 1 < _ROUNDS else []
        order: dict[str, Any] = {"pairs": self.pairs}
        if not self.pairs:
            i = self.inquiry
            left = i.accused
            order = {"findings": {"bad": sorted(i.bad), "links": i.links, "undecided": left, "rates": self.rates}}
        self.store.set(f"round/{number}", json.dumps(order))

    def part(self) -> None:
        """The store ends with node 0, so the others must have read the findings first; a silent node is not waited for
        longer than a measurement."""
        done = [f"done/{node}" for node in range(self.world) if node not in self.inquiry.bad]
        with contextlib.suppress(RuntimeError):
            self.store.wait(done, timedelta(seconds=min(10.0, self.seconds)))

    def collect(self, number: int) -> None:
        """Wait for the round's results; who stays silent has failed."""
        deadline = time.monotonic() + self.seconds
        rates: dict[Pair, float | None] = {}
        for pair in self.pairs:
            results = [self._result(number, node, deadline) for node in pair]
            known = [rate for rate in results if rate is not None]
            rates[pair] = min(known) if len(known) == 2 else None
        fine = [rate for rate in rates.values() if rate is not None]
        if self.least is None and fine:
            self.least = thresholds(fine, PART)
        least = self.least or 0.0
        again = self.slow
        self.slow = {pair: rate for pair, rate in rates.items() if rate is not None and rate < least and not again}
        if self.slow:
            self.held = {pair: rate for pair, rate in rates.items() if pair not in self.slow}
            return
        for pair in again:
            rate = rates[pair]
            rates[pair] = None if rate is None else max(rate, again[pair])
        rates |= self.held
        self.held = {}
        self.rates |= {f"{a}-{b}": rate for (a, b), rate in rates.items()}
        self.inquiry.record_results((pair, rate is not None and rate >= least) for pair, rate in rates.items())

    def _result(self, number: int, node: int, deadline: float) -> float | None:
        key = f"result/{number}/{node}"
        try:
            self.store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            rate = json.loads(self.store.get(key))
        except (RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            return None
        return None if rate is None else float(rate)


def in_a_process(host: str, port: int, seconds: float = _MEASURE_SECONDS) -> Measure:
    """Measures by a process of its own on each side, which meet in the store at host:port."""

    def measure(pair: Pair, node: int, number: int) -> float:
        words = [host, str(port), f"pair/{number}/{pair[0]}-{pair[1]}", str(pair.index(node)), str(seconds)]
        module = module_command("megascale.resilience.diagnose.pairs")
        done = subprocess.run([*module, *words], capture_output=True, text=True, timeout=seconds, check=True)
        return float(done.stdout.strip().splitlines()[-1])

    return measure


def _all_reduce(host: str, port: int, prefix: str, rank: int, seconds: float) -> float:
    """GB/s of an all-reduce between two processes, sums checked."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    limit = timedelta(seconds=seconds)
    store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False))
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=2, timeout=limit)
    size = _DEVICE_BYTES if cuda else _HOST_BYTES
    best, tries = float("inf"), 0
    more = torch.ones(1, device=device)
    began = time.perf_counter()
    while more.item():
        x = torch.full((size // 4,), rank + 1.0, device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(x)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
        if not bool((x == 3.0).all()):
            raise RuntimeError("the sum is wrong")
        tries += 1
        more.fill_(tries < _LEAST_TRIES or time.perf_counter() - began < _TRY_SECONDS)
        dist.all_reduce(more)  # both go on for as long as one wants to
    dist.barrier()
    dist.destroy_process_group()
    return size / best / 1e9


if __name__ == "__main__":
    print(_all_reduce(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
