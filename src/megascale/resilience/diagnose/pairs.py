"""All-reduce between pairs of nodes, regrouped until the bad nodes are identified, with one process per node.

Neighbours are tested first. If a pair fails, both nodes are suspects. Each suspect is then tested with good nodes,
which have passed with another node. A suspect that fails with two good nodes is bad. A suspect that passes once is
good, and then the link of the failed pair is bad. (DLRover regroups pairs once for the same purpose.)

Nodes meet in a store that node 0 serves, and node 0 announces the pairs of each round there. A node that does not
report in time has failed, so a dead node is found like a slow node. Slow pairs are measured again before they count as
failed, since a host may have been busy. Every measurement is a separate process, which can hang or crash alone.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megascale.core.python_process import module_command
from megascale.resilience.diagnose.check import SelfCheck

MIN_RATE_SHARE = 0.5  # fraction of the first round's median rate that a pair must reach
_MEASURE_SECONDS = 60.0  # for the measurement of a pair, the start of its processes included
_DEVICE_BYTES = 64 << 20  # of the reduced tensor on GPUs
_HOST_BYTES = 8 << 20  # of the reduced tensor on CPUs
# A pair makes at least _MIN_REPEATS all-reduces, and continues for at least _MIN_SECONDS. The fastest one counts, since
# a node may be busy for a moment.
_MIN_REPEATS = 5
_MIN_SECONDS = 1.0
_ROUND_LIMIT = 32  # largest number of rounds, including rounds that measure slow pairs again

Pair = tuple[int, int]
# (pair, this node, number of the round) -> GB/s. It raises if the measurement fails.
Measure = Callable[[Pair, int, int], float]


@dataclass
class Inquiry:
    """The state of an inquiry over nodes, without I/O.

    Attributes:
        nodes: node numbers in the order of their location, so that neighbours share a switch.
        good_nodes: nodes that passed with another node.
        bad_nodes: nodes that failed with two good nodes.
        tested_pairs: pairs that were tested. The lower node number is first in every pair.
    """

    nodes: Sequence[int]
    good_nodes: set[int] = field(default_factory=set)
    bad_nodes: set[int] = field(default_factory=set)
    failed_pairs: set[Pair] = field(default_factory=set)
    tested_pairs: set[Pair] = field(default_factory=set)

    @property
    def suspects(self) -> list[int]:
        """Nodes that are neither good nor bad, in order of location."""
        return [node for node in self.nodes if node not in self.good_nodes and node not in self.bad_nodes]

    @property
    def bad_links(self) -> list[Pair]:
        """Failed pairs of two good nodes, whose link must be bad."""
        return sorted(pair for pair in self.failed_pairs if set(pair) <= self.good_nodes)

    def choose_pairs(self) -> list[Pair]:
        """Return the pairs of the next round, without a node in two pairs. They are empty after the last round."""
        if not self.tested_pairs:
            # Of an odd number of nodes the last one is tested in the next round.
            return [_sorted_pair(a, b) for a, b in zip(self.nodes[::2], self.nodes[1::2], strict=False)]
        witnesses = [node for node in self.nodes if node in self.good_nodes]
        if witnesses:
            return self._pair_with_witnesses(witnesses)
        return self._pair_suspects()

    def _pair_with_witnesses(self, witnesses: list[int]) -> list[Pair]:
        """Pair each suspect with the nearest good node with which it was not tested yet."""
        pairs = []
        for suspect in self.suspects:
            location = self.nodes.index(suspect)
            for witness in sorted(witnesses, key=lambda node: abs(self.nodes.index(node) - location)):
                if _sorted_pair(suspect, witness) not in self.tested_pairs:
                    witnesses.remove(witness)
                    pairs.append(_sorted_pair(suspect, witness))
                    break
        return pairs

    def _pair_suspects(self) -> list[Pair]:
        """Pair suspects in pairs that were not tested yet, since no node is good."""
        pairs = []
        unpaired = self.suspects
        while len(unpaired) > 1:
            suspect = unpaired.pop(0)
            for partner in unpaired:
                if _sorted_pair(suspect, partner) not in self.tested_pairs:
                    unpaired.remove(partner)
                    pairs.append(_sorted_pair(suspect, partner))
                    break
        return pairs

    def record_results(self, results: Iterable[tuple[Pair, bool]]) -> None:
        """Record the results of a round: (pair, passed)."""
        for nodes, passed in results:
            pair = _sorted_pair(nodes[0], nodes[1])
            self.tested_pairs.add(pair)
            if passed:
                self.good_nodes.update(pair)
            else:
                self.failed_pairs.add(pair)
        for node in self.suspects:
            partners = {b if node == a else a for a, b in self.failed_pairs if node in (a, b)}
            if len(partners & self.good_nodes) > 1:
                self.bad_nodes.add(node)
        self.bad_nodes -= self.good_nodes


def _sorted_pair(a: int, b: int) -> Pair:
    """Return two nodes with the lower number first."""
    return (a, b) if a < b else (b, a)


@dataclass(frozen=True)
class Findings:
    """The result of an inquiry.

    Attributes:
        bad_nodes: nodes that fail with good nodes.
        bad_links: pairs of good nodes with a bad link.
        undecided_nodes: nodes that are neither good nor bad after the last round.
        rates: GB/s by pair "A-B", None for a failed pair.
    """

    bad_nodes: tuple[int, ...]
    bad_links: tuple[Pair, ...]
    undecided_nodes: tuple[int, ...]
    round_count: int
    rates: dict[str, float | None]

    def to_self_check(self, node: int) -> SelfCheck:
        """Return the result for one node."""
        name = "all-reduce with neighbours"
        rates = [rate for pair, rate in self.rates.items() if str(node) in pair.split("-") and rate is not None]
        best = max(rates, default=None)
        if node in self.bad_nodes:
            return SelfCheck(name, "failed", best, "GB/s", details=f"node {node} fails with good nodes")
        if node in self.undecided_nodes:
            return SelfCheck(
                name, "failed", best, "GB/s", details=f"nodes {list(self.undecided_nodes)} fail with each other"
            )
        details = f"{self.round_count} rounds"
        if self.bad_nodes:
            details += f"; bad nodes: {list(self.bad_nodes)}"
        if self.bad_links:
            details += f"; bad links: {[list(link) for link in self.bad_links]}"
        return SelfCheck(name, "passed", best, "GB/s", details=details)


def join_inquiry(store: Any, node: int, world: int, measure: Measure, seconds: float = _MEASURE_SECONDS) -> Findings:
    """Take part in all rounds; every node returns the same findings.

    Args:
        store: torch store that all nodes share.
        node: number of this node in the order of location; node 0 leads.
        world: number of nodes.
        seconds: time for a measurement, after which a silent node has failed.
    """
    leader = _Leader(store, world, seconds) if node == 0 else None
    for round_number in range(_ROUND_LIMIT):
        if leader is not None:
            leader.announce(round_number)
        # Node 0 announces a round once every pair of the previous round has reported or its time is over.
        store.wait([f"round/{round_number}"], timedelta(seconds=4 * seconds))
        order = json.loads(store.get(f"round/{round_number}"))
        if "findings" in order:
            findings = order["findings"]
            store.set(f"done/{node}", "1")
            if leader is not None:
                leader.wait_for_readers()
            links = tuple((a, b) for a, b in findings["links"])
            return Findings(
                bad_nodes=tuple(findings["bad"]),
                bad_links=links,
                undecided_nodes=tuple(findings["undecided"]),
                round_count=round_number,
                rates=findings["rates"],
            )
        for a, b in order["pairs"]:
            if node in (a, b):
                rate = None
                with contextlib.suppress(Exception):  # A failed measurement is a result too.
                    rate = measure((a, b), node, round_number)
                store.set(f"result/{round_number}/{node}", json.dumps(rate))
        if leader is not None:
            leader.collect(round_number)
    raise AssertionError("an inquiry ends within its rounds")


class _Leader:
    """The work of node 0: announces the pairs of each round, and collects the results."""

    def __init__(self, store: Any, world: int, seconds: float) -> None:
        self._store = store
        self._world = world
        self._seconds = seconds
        self._inquiry = Inquiry(range(world))
        self._pairs: list[Pair] = []
        self._rates: dict[str, float | None] = {}
        self._min_rate: float | None = None  # GB/s that a pair must reach, from the first round with a rate on
        # If pairs of the last round were slow, only they are measured again. Until the round counts, `_slow_rates` has
        # their first rates, and `_other_rates` those of the round's other pairs.
        self._slow_rates: dict[Pair, float] = {}
        self._other_rates: dict[Pair, float | None] = {}

    def announce(self, round_number: int) -> None:
        """Announce the pairs of a round, or the findings after the last round."""
        self._pairs = []
        if round_number + 1 < _ROUND_LIMIT:  # The last round that the limit allows announces the findings.
            self._pairs = list(self._slow_rates) or self._inquiry.choose_pairs()
        order: dict[str, Any] = {"pairs": self._pairs}
        if not self._pairs:
            inquiry = self._inquiry
            order = {
                "findings": {
                    "bad": sorted(inquiry.bad_nodes),
                    "links": inquiry.bad_links,
                    "undecided": inquiry.suspects,
                    "rates": self._rates,
                }
            }
        self._store.set(f"round/{round_number}", json.dumps(order))

    def wait_for_readers(self) -> None:
        """Wait until the other nodes have read the findings, since the store ends with this process."""
        keys = [f"done/{node}" for node in range(self._world) if node not in self._inquiry.bad_nodes]
        with contextlib.suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=min(10.0, self._seconds)))

    def collect(self, round_number: int) -> None:
        """Collect the results of a round. If pairs were slow, the results count only after a second measurement."""
        rates = self._read_rates(round_number)
        valid_rates = [rate for rate in rates.values() if rate is not None]
        if self._min_rate is None and valid_rates:
            self._min_rate = MIN_RATE_SHARE * statistics.median(valid_rates)
        min_rate = self._min_rate or 0.0
        if not self._slow_rates:  # This is the first measurement of these pairs.
            slow = {pair: rate for pair, rate in rates.items() if rate is not None and rate < min_rate}
            if slow:
                self._slow_rates = slow
                self._other_rates = {pair: rate for pair, rate in rates.items() if pair not in slow}
                return
        # The better of two rates counts. A pair that fails at the second measurement has failed.
        for pair, earlier_rate in self._slow_rates.items():
            rate = rates[pair]
            if rate is not None:
                rates[pair] = max(rate, earlier_rate)
        rates |= self._other_rates
        self._slow_rates = {}
        self._other_rates = {}
        self._rates |= {f"{a}-{b}": rate for (a, b), rate in rates.items()}
        self._inquiry.record_results((pair, rate is not None and rate >= min_rate) for pair, rate in rates.items())

    def _read_rates(self, round_number: int) -> dict[Pair, float | None]:
        """Return the lower rate of the two nodes for each pair, None for a failed pair."""
        deadline = time.monotonic() + self._seconds
        rates: dict[Pair, float | None] = {}
        for pair in self._pairs:
            results = [self._read_result(round_number, node, deadline) for node in pair]
            valid = [rate for rate in results if rate is not None]
            rates[pair] = None
            if len(valid) == 2:
                rates[pair] = min(valid)
        return rates

    def _read_result(self, round_number: int, node: int, deadline: float) -> float | None:
        """Return a node's rate, None if it has failed or is silent until `deadline`."""
        key = f"result/{round_number}/{node}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            rate = json.loads(self._store.get(key))
        except (RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            return None
        if rate is None:
            return None
        return float(rate)


def measure_in_process(host: str, port: int, seconds: float = _MEASURE_SECONDS) -> Measure:
    """Return a function that measures a pair.

    Each node of the pair starts a child process (the end of this file). The children meet in the store at host:port.
    """

    def measure(pair: Pair, node: int, round_number: int) -> float:
        module = "megascale.resilience.diagnose.pairs"
        prefix = f"pair/{round_number}/{pair[0]}-{pair[1]}"
        command = module_command(module, host, str(port), prefix, str(pair.index(node)), str(seconds))
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
        return float(result.stdout.strip().splitlines()[-1])

    return measure


def _all_reduce(host: str, port: int, prefix: str, rank: int, seconds: float) -> float:
    """Return the rate of an all-reduce between two processes in GB/s. Raises RuntimeError if a sum is wrong.

    Args:
        host, port: address of the store in which the processes meet.
        prefix: prefix of the pair's keys in the store.
        rank: 0 or 1.
        seconds: time-out of each collective.
    """
    import torch
    import torch.distributed as dist

    from megascale.resilience.diagnose.compute import synchronize

    device = torch.device("cpu")
    backend = "gloo"
    size = _HOST_BYTES
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        backend = "nccl"
        size = _DEVICE_BYTES
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=2,
        timeout=timeout,
    )
    best = float("inf")
    repeats = 0
    unfinished = torch.ones(1, device=device)
    begun = time.perf_counter()
    while unfinished.item():
        x = torch.full((size // 4,), rank + 1.0, device=device)  # float32; the sum of both ranks is 3
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(x)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
        if not bool((x == 3.0).all()):
            raise RuntimeError("the sum is wrong")
        repeats += 1
        unfinished.fill_(repeats < _MIN_REPEATS or time.perf_counter() - begun < _MIN_SECONDS)
        dist.all_reduce(unfinished)  # Both ranks continue until both have finished.
    dist.barrier()
    dist.destroy_process_group()
    return size / best / 1e9


if __name__ == "__main__":
    host_argument, port_argument, prefix_argument, rank_argument, seconds_argument = sys.argv[1:]
    rate_gb_s = _all_reduce(
        host_argument,
        int(port_argument),
        prefix=prefix_argument,
        rank=int(rank_argument),
        seconds=float(seconds_argument),
    )
    print(rate_gb_s)
