"""Engine, weights and optimizer state that a process retains between two attempts.

At the start a process continues with the retained engine, or makes a new one and passes on the retained state. When the
attempt ends and the process stays (train/parking.py), it retains both for the next attempt.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megascale import checkpoint
from megascale.checkpoint.background.staging import StagingSlot
from megascale.checkpoint.live_state import LiveState
from megascale.checkpoint.object_collectives import Peers
from megascale.core.batch import SampleFields
from megascale.core.layout import Layout
from megascale.parallel.rendezvous_numbers import align_rendezvous
from megascale.train import replay_response
from megascale.train.attempt import Attempt
from megascale.train.attention_choice import Choices
from megascale.train.device_reserve import UNCACHED_BYTES, cache_first_step, count_cached_bytes
from megascale.train.engine import Engine
from megascale.train.engine_rejoin import (
    find_complete_step,
    find_rejoin_obstacle,
    find_state_obstacle,
    leave_groups,
    rejoin_groups,
)
from megascale.train.parking import Parking, RetainedState
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder
from megascale.train.snapshot_reserve import compute_snapshot_reserve

log = logging.getLogger("megascale.train")
_SPARE_DEVICE_BYTES = 2 << 30  # of a GPU, next to the kept state and a new engine: communicators and transfers


class StateRetention:
    """Provides the engine of an attempt, and retains engine and state for the next one.

    Args:
        attempt: the present attempt, whose ranks have met.
        parking: lets the process outlive the attempt; None if nothing is retained.

    Attributes:
        live: state that this process has retained, to be loaded; None if the process ends with its attempt.
        stored: newest commit in storage, if it was read before the load.
        has_rejoined: whether the engine has outlived an attempt.
        needs_state: whether the engine has no initial weights, so that a state must be loaded.
        has_state: whether the state of a step is complete in the engine.
        keeps_state: whether all ranks leave with their state in memory and without a copy; the same on all ranks.
        unconfirmed_note: which states the load skips because no replay has confirmed them; "" for none.
    """

    def __init__(
        self, layout: Layout, rank_info: RankInfo, folder: RunFolder, attempt: Attempt, parking: Parking | None
    ) -> None:
        self.live: LiveState | None = None
        self.stored: checkpoint.StoredState | None = None
        self._slots: Sequence[StagingSlot] = ()  # retained staging memory, until the checkpointer takes it
        self.has_rejoined = False
        self.needs_state = False
        self.has_state = False
        self.keeps_state = False
        self.unconfirmed_note = ""
        self._layout = layout
        self._rank_info = rank_info
        self._folder = folder
        self._attempt = attempt
        self._parking = parking

    # the start of an attempt ------------------------------------------------------------------------------------

    def make_engine(self, earlier_choices: Choices, fields: SampleFields) -> Engine:
        """Return the engine that this process has retained, or a new one. Set `live` to the retained state.

        Args:
            earlier_choices, fields: as for `Engine`.
        """
        self._attempt.await_predecessors()
        self._align_rendezvous()
        # Without a state to load, the run starts at step 0, for which only a new engine draws the initial weights.
        can_rejoin = self._parking is not None and self._attempt.number > 1 and self._can_load()
        retained = None
        if self._parking is not None:
            self.live = LiveState()
            retained = self._parking.take_retained()
        if retained is not None:
            engine = self._take_engine(retained, can_rejoin=can_rejoin)
            if engine is not None:
                assert self._attempt.groups is not None
                self._attempt.engine = engine
                rejoin_groups(engine, self._attempt.groups, earlier_choices)
                self.has_rejoined = True
                self.needs_state = True
                return engine
            self._keep_shards(retained)
        engine = Engine(
            self._layout,
            self._attempt.groups,
            self._rank_info.device,
            earlier_choices,
            fields=fields,
            draws_weights=not can_rejoin,
        )
        self._attempt.engine = engine
        self.needs_state = can_rejoin
        if self._parking is not None:
            self._parking.hold_updates(engine)
            self._parking.release_reserve()
            if can_rejoin and retained is None:
                cache_first_step(self._layout.config, self._rank_info.world, self._rank_info.device)
        return engine

    def _align_rendezvous(self) -> None:
        """Let exchanges between GPUs of new processes meet those of processes that have survived. Collective."""
        device = self._rank_info.device
        if self._parking is None or self._attempt.number <= 1 or self._rank_info.world == 1 or device.type != "cuda":
            return
        peers = Peers()
        count = align_rendezvous(lambda number: peers.all_gather(number, int), device)
        if count:
            log.info("this process has made %d rendezvous of GPU memory with itself, to have the others' number", count)

    def _take_engine(self, retained: RetainedState, *, can_rejoin: bool) -> Engine | None:
        """Take slots, state and engine out of `retained`. Return None if the engine does not fit this attempt."""
        self._slots = retained.slots
        self.live = retained.live
        engine = retained.engine
        retained.engine = None
        if engine is None or not can_rejoin or self._attempt.groups is None:
            return None
        is_same = retained.rank == self._rank_info.rank and engine.layout == self._layout
        if not is_same:
            return None
        return engine

    def _keep_shards(self, retained: RetainedState) -> None:
        """Keep the retained state next to a new engine, unless the device's memory does not suffice.

        The retained buffers do not fit the parameters that this rank has now. Its shards of the state stay until the
        ranks that need them have received them.
        """
        self.live = replace(retained.live, is_in_place=False)
        if self._parking is not None and self._parking.is_reused:
            gc.collect()  # frees the memory of the earlier engine
        if not self._has_memory_for(self.live):
            log.info("the kept state does not fit next to a new engine, so the state is loaded from memory")
            self.live = retained.live = LiveState()
            self._return_cached_memory()

    def _return_cached_memory(self) -> None:
        """Return the memory that no tensor uses to the device."""
        gc.collect()
        if self._rank_info.device.type == "cuda":
            torch.cuda.empty_cache()

    def _has_memory_for(self, live: LiveState) -> bool:
        """Return whether a new engine fits into the device's memory next to the retained state.

        Memory that torch's allocator has cached stays there if the device has enough besides, since each allocation of
        the new engine and of its first step would otherwise wait for the driver.
        """
        device = self._rank_info.device
        if device.type != "cuda":
            return True
        memory, _ = self._layout.stage_memory(self._layout.grid.coordinate(self._rank_info.rank).pipeline)
        needed = memory.weights + memory.weight_copies + memory.gradients + memory.optimizer + _SPARE_DEVICE_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        if free >= UNCACHED_BYTES and needed <= free + count_cached_bytes(device):
            return True
        self._return_cached_memory()
        if not live.shards:
            return True
        free, _ = torch.cuda.mem_get_info(device)
        return needed <= free + count_cached_bytes(device)

    def _can_load(self) -> bool:
        """Return whether the load will find a state of this run; the same on all ranks. Collective."""
        section = self._layout.config.checkpoint
        if not section.resume:
            return False
        self.skip_unconfirmed_states()
        self.stored = checkpoint.find_stored_state(section, self._folder.path, Peers())
        return checkpoint.has_saved_state(section, self._folder.path, Peers(), self.stored)

    def skip_unconfirmed_states(self) -> None:
        """Let the load skip the states that no replay has confirmed. Rank 0 marks them."""
        if self._rank_info.rank == 0:
            location = self._layout.config.checkpoint.location or self._folder.checkpoints
            self.unconfirmed_note = replay_response.skip_unconfirmed_states(self._folder, location)

    def make_checkpointer(self, engine: Engine, early_slots: checkpoint.EarlySlots | None) -> checkpoint.Checkpointer:
        """Return the checkpointer of this rank's shards, with the staging memory that exists already.

        Args:
            early_slots: staging memory that was ordered before the engine existed; None if none was ordered.
        """
        config, groups = self._layout.config, self._attempt.groups
        shards = [checkpoint.TensorShard(*fields) for fields in engine.logical_tensors()]
        check: Callable[[], None] = lambda: None
        if self._parking is not None:
            check = self._parking.check
        if early_slots is not None:
            self._slots = early_slots.take(check)
        side_group = None
        if groups is not None:
            side_group = groups.side
        checkpointer = checkpoint.Checkpointer(
            config.checkpoint,
            self._folder.path,
            shards,
            reused_slots=self._slots,
            reserve=compute_snapshot_reserve(config),
            check=check,
            side_group=side_group,
        )
        self._slots = ()
        return checkpointer

    # the end of an attempt --------------------------------------------------------------------------------------

    def can_keep(self, engine: Engine, checkpointer: checkpoint.Checkpointer) -> bool:
        """Return whether all ranks can keep their state in memory until the next attempt. Collective."""
        assert self._parking is not None
        can_keep = not self._parking.doubt and not find_state_obstacle(engine)
        device = self._rank_info.device
        if can_keep and device.type == "cuda":
            kept_bytes = sum(shard.tensor.nbytes for shard in checkpointer.shards)
            needed = kept_bytes + torch.cuda.memory_allocated(device) + _SPARE_DEVICE_BYTES
            can_keep = needed <= torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return checkpointer.peers.all_true(can_keep)

    def retain(
        self,
        engine: Engine,
        checkpointer: checkpoint.Checkpointer,
        *,
        step: int,
        describe_state: Callable[[], dict[str, Any]],
    ) -> None:
        """Retain engine, state and staging memory for the next attempt. The engine leaves its groups.

        Args:
            step: the last step that this rank has queued.
            describe_state: returns the state of the last counted step besides tensors.
        """
        parking = self._parking
        assert parking is not None
        parking.end_leaving_phase("observers")
        obstacle = find_state_obstacle(engine)
        if obstacle:
            log.info("this process stays for the next attempt, which loads the state: %s", obstacle)
            parking.retained = RetainedState(checkpointer.leave())
            return
        live = checkpointer.keep_state(self._attempt.number)
        try:
            engine.close(failed=True)
            leave_groups(engine, has_abort=not parking.keeps_groups, end_phase=parking.end_leaving_phase)
            live = replace(live, step=self._find_complete_step(engine, step))
            parking.end_leaving_phase("step")
        finally:
            # Without its own state, the next attempt needs this rank's last snapshot.
            slots = checkpointer.leave(awaits_snapshots=live.step < 0)
            parking.end_leaving_phase("snapshots")
        if live.step < 0:
            live = LiveState()
        elif self._rank_info.rank == 0:
            state = describe_state()
            if live.step == state.get("step"):
                live = replace(live, state=state)
        obstacle = find_rejoin_obstacle(engine)
        if obstacle:
            log.info("this process stays for the next attempt, which makes a new engine: %s", obstacle)
            parking.retained = RetainedState(slots, replace(live, is_in_place=False))
            return
        parking.retained = RetainedState(slots, live, engine, self._rank_info.rank)

    def _find_complete_step(self, engine: Engine, step: int) -> int:
        """Return the step whose state the engine has after it has left its groups, -1 if the state is incomplete."""
        if not self.has_state:
            return -1
        if self.keeps_state:
            return step  # the ranks left together, after a complete step
        return find_complete_step(engine)
