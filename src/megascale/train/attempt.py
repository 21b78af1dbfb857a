"""One attempt of a run on this rank: the run's locks, and the groups that the rank shares with all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from megascale import checkpoint
from megascale.checkpoint.object_collectives import Peers
from megascale.config import Config
from megascale.core.group_names import make_attempt_suffix
from megascale.errors import ConfigError, DataError, FitError, MegascaleError, error_class_name, make_error
from megascale.rendezvous.groups import Groups, shutdown
from megascale.rendezvous.prepared_groups import GroupPreparation
from megascale.rendezvous.start_job import initialise
from megascale.train.claim import take_run_locks
from megascale.train.ending import Ending
from megascale.train.engine import Engine
from megascale.train.parking import Parking
from megascale.train.predecessors import await_predecessors
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder


class Attempt:
    """Takes the run's locks, meets the other ranks, and ends the use of the groups.

    Args:
        config: the resolved configuration.
        ending: learns whether this start may write into the run folder.
        parking: executes the agent's orders; None if the process ends with this start.

    Attributes:
        number: number of the attempt, from 1. In `join` all ranks take rank 0's number.
        groups: communicators; None before `join`, and for a world of one.
        engine: uses the groups; None before it exists.
    """

    def __init__(
        self, config: Config, rank_info: RankInfo, folder: RunFolder, ending: Ending, parking: Parking | None
    ) -> None:
        self.number = folder.find_next_attempt()
        self.groups: Groups | None = None
        self.engine: Engine | None = None
        self._config = config
        self._rank_info = rank_info
        self._folder = folder
        self._ending = ending
        self._parking = parking

    def join(self, resources: contextlib.ExitStack) -> None:
        """Take the run's locks on rank 0 and meet the other ranks. `resources` releases locks and groups.

        Raises MegascaleError on every rank if rank 0 or this rank refuses the start.
        """
        resources.push(self._end_unused_service)
        refusal: MegascaleError | None = None
        if self._rank_info.rank == 0:
            self.await_predecessors()  # the kernel releases the run's lock when it has freed the holder's memory
            try:
                for lock in take_run_locks(self._config):
                    resources.callback(lock.release)
            except MegascaleError as error:
                refusal = error
            self._ending.owns_folder = refusal is None
        if self._rank_info.world > 1:
            refusal = self._meet_ranks(resources, refusal)
        if refusal is not None:
            self._ending.is_reported = True  # the training that holds the lock must not see this start's end
            raise refusal

    def _end_unused_service(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the checkpoint service end at once after a refused start, if it has no snapshot."""
        if self._ending.owns_folder and isinstance(error, ConfigError | DataError | FitError):
            checkpoint.end_unused_service(self._config.checkpoint, self._folder.path)

    def await_predecessors(self) -> None:
        """Wait until killed processes have freed the memory that this process needs, if the agent has named any."""
        if self._parking is not None:
            await_predecessors(self._parking.check)

    def _meet_ranks(self, resources: contextlib.ExitStack, refusal: MegascaleError | None) -> MegascaleError | None:
        """Initialise the groups and take rank 0's attempt number.

        Return why this rank or rank 0 refuses the start, None if both accept it.
        """
        info = self._rank_info
        if self.number > 1 and info.local_rank == 0:
            # A node that replaces a lost one receives its state through a checkpoint service, which does not run yet.
            checkpoint.start_service(self._config.checkpoint, self._folder.path)
        self.groups = self._make_groups()
        resources.callback(self._leave_groups, self.groups)
        if self._parking is not None:
            self._parking.watch_groups(self.groups)
        if refusal is not None:
            packed_refusal = (error_class_name(refusal), str(refusal))
        else:
            packed_refusal = None
        # Rank 0's values replace those of all other ranks.
        values = (self.number, self._config.train.precision, packed_refusal)
        self.number, leader_precision, leader_refusal = Peers().broadcast(
            values, tuple[int, str, tuple[str, str] | None]
        )
        if refusal is not None:
            return refusal
        if leader_refusal is not None:
            return make_error(*leader_refusal)
        return compare_precision(self._config.train.precision, leader_precision, info)

    def _make_groups(self) -> Groups:
        """Meet the other ranks. Raises LeaveAttempt if the agent orders this rank to leave meanwhile."""
        info, parking = self._rank_info, self._parking
        check: Callable[[], None] | None = None
        name_suffix = ""
        preparation: GroupPreparation | None = None
        try:
            if parking is not None:
                parking.watch_start()
                check = parking.check
                name_suffix = make_attempt_suffix(self.number)
                preparation = parking.preparation
            return initialise(
                self._config,
                rank=info.rank,
                world=info.world,
                local_rank=info.local_rank,
                device=info.device,
                check=check,
                name_suffix=name_suffix,
                exchanges_state=parking is not None and self.number > 1,
                preparation=preparation,
            )
        except Exception:
            if parking is not None:
                parking.leave_start(info.device)
            raise

    def synchronize(self) -> None:
        """Wait for the gathers that have begun, unless they can no longer end."""
        if not self._ending.has_lost_peers and self.engine is not None:
            self.engine.synchronize()

    def _leave_groups(self, groups: Groups) -> None:
        """Shut the groups down, after the engine's use of them."""
        self.synchronize()
        failed = self._ending.has_lost_peers
        if self._parking is not None:
            self._parking.end_leaving_phase("feed")
        if self.engine is not None:
            self.engine.close(failed)
        if self._parking is not None and self._parking.keeps_groups:
            self._parking.leave_groups(groups)
        shutdown(groups, failed=failed)
        if self._parking is not None:
            self._parking.end_leaving_phase("groups")


def compare_precision(precision: str, leader_precision: str, info: RankInfo) -> MegascaleError | None:
    """Return an error if this rank's precision differs from rank 0's.

    They may differ without a setting, since the default depends on the rank's device.
    """
    if precision == leader_precision:
        return None
    if info.device.type == "cuda":
        advised_precision = leader_precision
    else:
        advised_precision = "float32"
    return ConfigError(
        f"train.precision is {precision} on rank {info.rank} and {leader_precision} on rank 0, whose devices "
        f"differ; set --train.precision={advised_precision}"
    )
