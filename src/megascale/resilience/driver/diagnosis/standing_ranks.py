"""Ranks that stand still, as their agents see them: asked for, waited for not too long, put together as one scene."""

from __future__ import annotations

import asyncio
import time

from megascale.core.layout import Layout, lay_out
from megascale.errors import DataError, MegascaleError
from megascale.observe.hang.scene import RankEvidence, Scene, unpack_evidence
from megascale.resilience.driver.nodes.nodes import Nodes
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.protocol.agent_messages import Evidence

ANSWER = 15.0  # seconds that agents have, a stack of a process that cannot answer takes up to five
WATCH = 0.5  # seconds in which a rank that goes on is seen to
HISTORY, MANY, SHORT = 2048, 512, 256  # calls of each rank, and where there are more ranks than that, fewer


class StandingRanks:
    """Args:
    job, nodes: whose ranks they are, and where.
    settings: how they are laid out.
    """

    def __init__(self, job: Job, nodes: Nodes, settings: RunningSettings) -> None:
        self._job, self._nodes, self._settings = job, nodes, settings
        self._order = 0
        self._asking = asyncio.Lock()  # one at a time: an agent's answer is to the last order
        self._found: dict[int, Evidence] = {}
        self._wanted: set[int] = set()
        self._complete = asyncio.Event()

    async def gather(self, watch: float = WATCH) -> tuple[Scene, Layout | None]:
        """Ask all agents; what those said that answered in time, and how the ranks are laid out.

        Args:
            watch: seconds to look whether ranks move after all.
        """
        async with self._asking:
            return await self._gather(watch)

    @property
    def asking(self) -> bool:
        """Whether the agents are being asked now."""
        return self._asking.locked()

    async def _gather(self, watch: float) -> tuple[Scene, Layout | None]:
        job = self._job.state
        self._order += 1
        self._found, self._wanted = {}, set()
        self._complete.clear()
        for name in job.placement:
            node = self._nodes[name]
            if node.channel is not None:  # one that is gone says nothing
                self._wanted |= set(job.ranks(name))
                history = SHORT if job.world > MANY else HISTORY
                self._nodes.order(node, do="explain", order=self._order, history=history, watch=watch)
        try:
            async with asyncio.timeout(ANSWER):
                if self._wanted:
                    await self._complete.wait()
        except TimeoutError:
            pass
        found, self._wanted = self._found, set()
        scene = await asyncio.to_thread(_scene, found, job.world)
        return scene, self._layout(job.data, job.world)

    def received(self, node: str, evidence: Evidence) -> None:
        """What an agent knows of one of its ranks."""
        if evidence.order == self._order and evidence.rank in self._job.state.ranks(node):
            self._found[evidence.rank] = evidence
            self._wanted.discard(evidence.rank)
            if not self._wanted:
                self._complete.set()

    def _layout(self, data: int, world: int) -> Layout | None:
        config = self._settings.config
        parallel = config.parallel.model_copy(update={"data": data})
        try:
            return lay_out(config.model_copy(update={"parallel": parallel}), world)
        except MegascaleError:
            return None


def _scene(found: dict[int, Evidence], world: int) -> Scene:
    ranks: dict[int, RankEvidence] = {}
    for rank, evidence in sorted(found.items()):
        try:
            if evidence.data:
                ranks[rank] = unpack_evidence(evidence.data)
        except DataError:
            continue
    moving = frozenset(rank for rank, evidence in found.items() if evidence.moving)
    return Scene(ranks, world, moving, time.time_ns())
