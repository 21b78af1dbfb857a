"""Which nodes are bad, from tests of pairs: neighbours are tested together, and regrouped until the bad ones stand out.

A pair that fails accuses both. Each accused node is then tested with nodes that have passed with somebody else: if it
fails with two of them it is named, if it passes once it is acquitted, and then the link of the pair that failed is to
blame (DLRover regroups pairs once in the same spirit). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Pair = tuple[int, int]


@dataclass
class Inquiry:
    """The state of an inquiry over nodes numbered as in `nodes`.

    Attributes:
        nodes: in the order of their location, so that neighbours share a switch.
        good: passed with somebody.
        bad: failed with two nodes that are good.
        broken: pairs that failed.
        tried: pairs tested, in either order.
    """

    nodes: Sequence[int]
    good: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    broken: set[Pair] = field(default_factory=set)
    tried: set[Pair] = field(default_factory=set)

    @property
    def accused(self) -> list[int]:
        """Nodes of which nothing is known yet but failed pairs, in order."""
        return [n for n in self.nodes if n not in self.good and n not in self.bad]

    def next_round(self) -> list[Pair]:
        """Pairs to test at once, no node twice; empty when nothing more can be learned."""
        accused = self.accused
        witnesses = [n for n in self.nodes if n in self.good]
        if not self.tried:
            return _neighbours(self.nodes)
        pairs: list[Pair] = []
        free, taken = list(witnesses), set()
        for node in accused:
            # A witness that stands near, and has not been tested with it.
            near = sorted(free, key=lambda w: abs(self.nodes.index(w) - self.nodes.index(node)))
            witness = next((w for w in near if _key(node, w) not in self.tried), None)
            if witness is not None:
                free.remove(witness)
                taken.add(node)
                pairs.append(_key(node, witness))
        if witnesses:
            return pairs
        # Nobody has passed yet: accused ones are put together anew.
        left = [n for n in accused if n not in taken]
        while len(left) > 1:
            node = left.pop(0)
            partner = next((n for n in left if _key(node, n) not in self.tried), None)
            if partner is not None:
                left.remove(partner)
                pairs.append(_key(node, partner))
        return pairs

    def record_results(self, results: Iterable[tuple[Pair, bool]]) -> None:
        """Take in what pairs gave: (pair, whether it passed)."""
        received = [(_key(*pair), passed) for pair, passed in results]
        for (a, b), passed in received:
            self.tried.add((a, b))
            if passed:
                self.good |= {a, b}
            else:
                self.broken.add((a, b))
        for node in self.accused:
            against = {a + b - node for a, b in self.broken if node in (a, b)} & self.good
            if len(against) > 1:
                self.bad.add(node)
        self.bad -= self.good

    @property
    def links(self) -> list[Pair]:
        """Pairs that failed although both nodes passed with others: the way between them is bad."""
        return sorted(pair for pair in self.broken if pair[0] in self.good and pair[1] in self.good)

    @property
    def undecided(self) -> list[int]:
        """Accused nodes for which no witness is left: all of them are suspects. Empty while there are more rounds."""
        return self.accused if not self.next_round() else []


def _key(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _neighbours(nodes: Sequence[int]) -> list[Pair]:
    """Neighbours in pairs; an odd last one waits for a witness of the next round."""
    return [_key(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]


def thresholds(rates: Sequence[float], part: float) -> float:
    """Least rate that passes: `part` of the median of all pairs of a round."""
    ordered = sorted(rates)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return part * median
