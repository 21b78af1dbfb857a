"""Load of the state that a start goes on from: the run's newest state, or what the settings name for a new run."""

from __future__ import annotations

import time
from typing import Any

from megascale import checkpoint
from megascale.config import Config
from megascale.errors import ConfigError, TrainingError
from megascale.train.engine import Engine
from megascale.train.resume import ResumeGuard
from megascale.train.state_retention import StateRetention


class StateLoader:
    """Loads weights, optimizer state and counts on this rank. Nothing in the run folder changes.

    Args:
        config: the resolved configuration.
        resume_guard: decides whether this run may resume from a state.

    Attributes:
        measures: seconds and bytes of the load for the run's events; empty without a load.
        parts: parts of the load and their seconds, as text.
    """

    def __init__(
        self, config: Config, engine: Engine, checkpointer: checkpoint.Checkpointer, resume_guard: ResumeGuard
    ) -> None:
        self.measures: dict[str, float] = {}
        self.parts = ""
        self._config = config
        self._engine = engine
        self._checkpointer = checkpointer
        self._resume_guard = resume_guard
        self._is_continued = False  # true if the state is that of another run, with its counts

    def load(self, retention: StateRetention) -> dict[str, Any] | None:
        """Load the newest state if this run may resume from it, else the initial state.

        Return the state besides tensors; None if the run starts at step 0.

        Args:
            retention: the state that this process has retained, which the load takes.
        """
        if not self._config.checkpoint.resume:
            self._resume_guard.check_restart()
            retention.live = None
            return self._load_initial_state()
        if retention.stored is None:
            retention.skip_unconfirmed_states()
        state = self._load_newest(retention)
        if state is not None:
            self._load_base()
            return state
        if retention.needs_state:
            raise TrainingError("the saved state of the run was lost after this start had seen it and before the load")
        self._resume_guard.check_first_start()
        return self._load_initial_state()

    def _load_newest(self, retention: StateRetention) -> dict[str, Any] | None:
        """Load the newest state of the run from memory or storage. Return None if there is none."""
        load_start = time.monotonic()
        report = checkpoint.LoadReport()
        with self._engine.loading_weights():
            # An imported model has weights only. Its optimizer state stays zero, as before a first step.
            state = self._checkpointer.load(
                initial=self._list_weight_shards(),
                accept=self._resume_guard.check_state,
                report=report,
                live=retention.live,
                stored=retention.stored,
            )
        # Other ranks have received the shards of an earlier engine, whose memory is freed here.
        retention.live = None
        self.measures = {
            "load_seconds": round(time.monotonic() - load_start, 3),
            "read_bytes": report.read_bytes,
            "sent_bytes": report.sent_bytes,
        }
        self.parts = report.describe_seconds()
        if report.zeroed_states:
            names = ", ".join(sorted(report.zeroed_states))
            self._resume_guard.notes.append(f"{names} of optimizer.name={self._config.optimizer.name} starts at zero")
        return state

    def _load_initial_state(self) -> dict[str, Any] | None:
        """Load what checkpoint.start_from or checkpoint.imported names, for a run that has no checkpoint yet.

        Return the state besides tensors if the run continues another run's counts, else None.
        """
        section = self._config.checkpoint
        folder = section.imported
        if self._config.train.lora is not None:
            self._load_base()
        elif section.start_state == "continued":
            self._is_continued = True
            with self._engine.loading_weights():
                return self._resume_guard.load_continued(self._checkpointer.shards)
        elif section.start_from is not None:
            with self._engine.loading_weights():
                self._resume_guard.load_base(self._list_weight_shards())
        elif folder is not None:
            with self._engine.loading_weights():
                self._resume_guard.load_imported(folder, self._list_weight_shards())
        return None

    def _load_base(self) -> None:
        """Load the model that adapters are trained on; checkpoints of the run hold the adapters only."""
        if self._config.train.lora is None:
            return
        shards = []
        for piece, view in self._engine.list_base_pieces():
            shards.append(checkpoint.TensorShard(f"model.{piece.name}", piece.shape, piece.box.offsets, view))
        with self._engine.loading_weights():
            self._resume_guard.load_base(shards)

    def _list_weight_shards(self) -> list[checkpoint.TensorShard]:
        return [shard for shard in self._checkpointer.shards if shard.name.startswith("model.")]

    def check_remaining_steps(self, step: int) -> None:
        """Raise ConfigError if another run's state, with its counts, leaves no step to train.

        Args:
            step: steps of the loaded state.
        """
        section, last_step = self._config.checkpoint, self._config.train.steps
        if self._is_continued and step >= last_step:
            raise ConfigError(
                f"train.steps={last_step} is reached: checkpoint.start_from={section.start_from} is "
                f"at step {step}, and checkpoint.start_state=continued goes on from there; set more --train.steps"
            )
