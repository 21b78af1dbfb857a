"""The fabric inside the step model: ring times between hosts, longer by what sharing switches costs on a given fabric.

The step model's bandwidth between hosts is calibrated on the paper's own cluster, whose switches are in it already. So
what counts here is a fabric and placement relative to that one: `reference` slow-downs divide out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.network import Network


@dataclass(frozen=True)
class SharedFabricNetwork:
    """Attributes:

    base: times without sharing between groups.
    data, pipeline: slow-down of collectives and of transfers between stages, relative to the reference; at least 0.
    """

    base: Network
    data: float
    pipeline: float

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """See Network.collective; only groups that span hosts are slowed."""
        seconds = self.base.collective(bytes, ranks, ranks_per_host)
        return np.where(np.asarray(ranks) > np.asarray(ranks_per_host), self.data, 1.0) * seconds

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """See Network.p2p."""
        return np.where(inside, 1.0, self.pipeline) * self.base.p2p(bytes, inside)
