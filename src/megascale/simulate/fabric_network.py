"""The fabric inside the step model: transfers between hosts, longer by what sharing switches costs on a given fabric.

The step model's bandwidth between hosts is calibrated on the paper's own cluster, whose switches are in it already. So
what counts here is a fabric and placement relative to that one: `reference` slow-downs divide out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.network import Network


@dataclass(frozen=True, eq=False)
class SharedFabricNetwork:
    """Attributes:

    base: times without sharing between groups.
    data: [stages] slow-down of each stage's collectives (its slowest group), relative to the reference.
    pipeline: [replicas] slow-down of each replica's transfers between stages, likewise.
    """

    base: Network
    data: Any
    pipeline: Any

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """See Network.collective, of the slowest stage; only groups that span hosts are slowed."""
        seconds = self.base.collective(bytes, ranks, ranks_per_host)
        return np.where(np.asarray(ranks) > np.asarray(ranks_per_host), np.max(self.data), 1.0) * seconds

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """See Network.p2p, of the slowest replica."""
        return np.where(inside, 1.0, np.max(self.pipeline)) * self.base.p2p(bytes, inside)

    def stage_shares(self) -> Any:
        """See Network.stage_shares."""
        return np.asarray(self.data) / np.max(self.data)

    def replica_shares(self) -> Any:
        """See Network.replica_shares."""
        return np.asarray(self.pipeline) / np.max(self.pipeline)
