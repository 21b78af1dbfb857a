"""Requests of the ranks to stop, to leave the attempt, or to use the groups of the next attempt for the first time.

Each rank adds a number to every step. The ranks' sum comes with the step's loss, so all ranks follow the same requests
after the same step.
"""

from __future__ import annotations

from megascale.checkpoint.object_collectives import Peers
from megascale.train.parking import Parking

# A rank adds 1 to the sum after an interruption, and much less if the rank only leaves the attempt. The requests to
# leave of all ranks together stay below 1.
STOP_REQUEST = 1.0
LEAVE_REQUEST = 2.0**-20
# A rank whose groups of the next attempt are connected adds this. All ranks together stay below a request to leave.
WARM_REQUEST = 2.0**-40


class StopRequests:
    """Chooses this rank's request per step, and follows the sum of all ranks' requests.

    Attributes are the same on all ranks.

    Args:
        world: number of ranks.
        parking: receives the agent's orders; None if the process ends with this start.

    Attributes:
        is_stopping: whether the ranks stop after the present step.
        is_leaving: whether the ranks stop in order to begin a new attempt.
        must_warm_groups: whether the groups of the next attempt are connected on all ranks.
    """

    def __init__(self, world: int, parking: Parking | None) -> None:
        self.is_stopping = False
        self.is_leaving = False
        self.must_warm_groups = False
        self._world = world
        self._parking = parking

    def choose(self, must_stop: bool) -> float:
        """Return the request that this rank adds to the next step's sum, 0 to go on.

        Args:
            must_stop: whether a signal or a callback of this rank ends the run.
        """
        if must_stop:
            return STOP_REQUEST
        if self._parking is None:
            return 0.0
        if self._parking.must_leave_after_step:
            return LEAVE_REQUEST
        preparation = self._parking.preparation
        if preparation is not None and preparation.is_connected:
            return WARM_REQUEST
        return 0.0

    def follow(self, request_sum: float) -> None:
        """Set the attributes from the sum of all ranks' requests in a step."""
        if request_sum >= LEAVE_REQUEST:
            self.is_stopping = True
            self.is_leaving = request_sum < STOP_REQUEST
        self.must_warm_groups = request_sum == self._world * WARM_REQUEST

    def needs_no_copy(self, peers: Peers) -> bool:
        """Return whether the ranks leave with their state on the device, since prepared nodes join at once.

        The result is the same on all ranks. Collective if the ranks leave the attempt. A job that waits for nodes needs
        the copy, because its processes may end meanwhile.
        """
        if not self.is_leaving or self._parking is None:
            return False
        # The driver decides for all ranks, and the order may not have reached each of them.
        return not peers.all_true(not self._parking.joins_at_once)
