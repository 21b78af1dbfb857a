"""Checks at the start of a run: a saved state must come from this run, its model, its tokenizer and its data.

A *start* is one launch of a run's ranks. Rank 0 checks before any tensor of a checkpoint is read, and shares the result
with all ranks. Until the start is accepted, only the event log and the status files in the run folder change.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale import checkpoint
from megascale.checkpoint import setting_changes
from megascale.checkpoint.base_model import BaseCheckpoint, open_base
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.setting_changes import Change
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config
from megascale.core.model_folder import is_model_folder
from megascale.data.dataset import data_checks
from megascale.data.dataset.formats import is_text
from megascale.data.tokenizer.tokenizer import find_tokenizer_path
from megascale.errors import ConfigError, DataError
from megascale.train.imported_weights import copy_generation_config, load_folder
from megascale.train.run_folder import RunFolder, find_checkpoints
from megascale.train.run_tokenizer import copy_tokenizer
from megascale.train.trained_config import collect_hashes, locate_checkpoints


class ResumeGuard:
    """Checks and loads the state that this start resumes from, and claims the run's folders.

    Every public method is collective. The attributes are valid on rank 0 only.

    Attributes:
        changes: settings that differ from those of the checkpoint.
        notes: sentences for the user about the start.
        data_changed: whether this run's samples may differ from those of the checkpoint: its data set, its run or a
            setting of the order of samples differs.
        accepted_changes: keys of settings (and "run") whose changes the user accepts.
        base: the base model, which adapters are trained on or the run starts from; None before `find_base`.
    """

    def __init__(self, config: Config, run: RunFolder, peers: Peers) -> None:
        self.config = config
        self.run = run
        self.peers = peers
        self.accepted_changes = config.checkpoint.accept_changes
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.data_changed = False
        self.base: BaseCheckpoint | None = None
        self._saved_base: dict[str, Any] | None = None  # base-model record saved with the adapters
        self._identity: str | None = None
        self._location_owner = ""  # run that owned checkpoint.location when this start was checked
        self._data_hashes: dict[str, Any] = {}

    @property
    def checkpoint_metadata(self) -> dict[str, Any]:
        """Metadata that each checkpoint of this run holds: identity, hashes of data and tokenizer, and settings."""
        section = self.config.checkpoint.model_copy(update={"accept_changes": []})
        config = self.config.model_copy(update={"checkpoint": section})
        base = {}
        if self.config.train.lora is not None and self.base is not None:
            base["base"] = self.base.to_record()
        return {
            "run": {"id": self._identity, "name": self.config.train.name},
            **base,
            **self._data_hashes,
            "config": config.model_dump(exclude_none=True),
        }

    def check_state(self, state: Mapping[str, Any], name: str) -> bool:
        """Check that the run may resume from a state.

        Args:
            state: metadata of the checkpoint.
            name: name of the checkpoint for messages.

        Return whether to skip the optimizer state, because a different optimizer saved it. Raises DataError on all
        ranks if the run may not resume from the state.
        """
        self._run_check_on_rank0(lambda: self._check_state(state, name))
        return self._must_skip_optimizer_state(state)

    def _must_skip_optimizer_state(self, state: Mapping[str, Any]) -> bool:
        """Return whether a different optimizer saved the state.

        A state that does not name its optimizer counts as one of this run's optimizer.
        """
        current = self.config.optimizer.name
        return bool(_find_section(state, "optimizer").get("name", current) != current)

    def check_first_start(self) -> None:
        """Check a start that begins at step 0 because it found no state.

        Raises DataError on all ranks if the run had saved state that is now missing.
        """
        self._run_check_on_rank0(self._check_first_start)

    def check_restart(self) -> None:
        """Check a start that begins at step 0 because of checkpoint.resume=false.

        Raises DataError on all ranks if it is refused.
        """
        self._run_check_on_rank0(self._check_restart)

    def find_base(self) -> BaseCheckpoint:
        """Return the base model, which checkpoint.start_from or checkpoint.imported names; collective.

        The step is 0 in checkpoint.imported, and checkpoint.start_step in checkpoint.start_from. The default of
        start_step is the step that the checkpoint of resumed adapters records, or the newest step without such a
        record. Raises DataError on all ranks if the base model cannot be used or differs from the recorded one.
        """

        def open_and_compare() -> str | None:
            config = self.config.checkpoint
            if config.start_from is None:
                assert config.imported is not None
                self.base, _ = open_base(config.imported, 0, "checkpoint.imported")  # an import writes a step 0
            else:
                step = config.start_step
                if step is None and self._saved_base is not None:
                    step = self._saved_base["step"]
                folder = locate_checkpoints(config.start_from)
                self.base, _ = open_base(folder, step, "checkpoint.start_from")
            saved = self._saved_base
            if saved is None or saved["fingerprint"] == self.base.fingerprint:
                return None
            return (
                f"the adapters of {self.run.path} were trained on a different model from that of step {self.base.step} "
                f"in {self.base.folder} (fingerprint {saved['fingerprint'][:12]}, {self.base.fingerprint[:12]} now). "
                f"They belong to step {saved['step']} of {saved['folder']}; pass it with --checkpoint.start_from and "
                "--checkpoint.start_step"
            )

        self._run_check_on_rank0(open_and_compare)
        base_fields = ("", 0, "")  # ranks other than rank 0 receive its values
        if self.base is not None:
            base_fields = (self.base.folder, self.base.step, self.base.fingerprint)
        return BaseCheckpoint(*self.peers.broadcast(base_fields, tuple[str, int, str]))

    def load_base(self, weights: Sequence[checkpoint.TensorShard]) -> None:
        """Fill this process's weights from the base model; collective.

        Args:
            weights: shards of this process. Those of all processes must cover all weights of the base model.

        Raises DataError if the base model is missing, damaged or a different model, or has weights in no shard.
        """
        base = self.find_base()
        checkpoint.load(base.folder, weights, step=base.step, accept=self._accept_base, covers_model=True)
        if self.config.train.lora is None:
            use = "this run starts with"
        else:
            use = "the adapters are trained on"
        self.notes.append(f"{use} the weights of step {base.step} of {base.folder}")

    def load_continued(self, shards: Sequence[checkpoint.TensorShard]) -> dict[str, Any]:
        """Fill this process's weights and optimizer state from checkpoint.start_from, and return the saved metadata.

        If the data or the order of samples has changed, the returned metadata counts no trained samples ("samples" is
        0) and no read samples ("read", of `ReadTotals`, is None). Raises DataError under the conditions of `load_base`.
        """
        base = self.find_base()
        state = checkpoint.load(base.folder, shards, step=base.step, accept=self._accept_continued, covers_model=True)
        note = (
            f"this run continues step {base.step} of {base.folder} with its optimizer state and learning-rate schedule"
        )
        changed_keys = {change.key for change in self.changes} & setting_changes.SAMPLE_ORDER_KEYS
        has_same_data = state.get("data") == self._data_hashes.get("data") and not changed_keys
        has_same_data = self.peers.broadcast(has_same_data, bool)
        if has_same_data:
            note += f", after {state.get('samples', 0):,} samples"
        else:
            note += ", starting from the first sample of the new data"
            state = {**state, "samples": 0, "read": None}
        self.notes.append(note)
        self.changes = []  # changes since the run of start_from are not changes of this run
        return state

    def _accept_base(self, state: Mapping[str, Any], name: str) -> bool:
        """Refuse a different model. Settings of training may differ, because the load fills weights only.

        Return False (see `AcceptState`): no optimizer state has to be skipped.
        """
        changes_before = self.changes  # changes since the base model's run are not changes of this run

        def check() -> str | None:
            return self._compare_settings(state, name, is_start_only=True)

        self._run_check_on_rank0(check)
        self.changes = changes_before
        return False

    def _accept_continued(self, state: Mapping[str, Any], name: str) -> bool:
        """Refuse a different model. Return whether to skip the optimizer state."""
        self._run_check_on_rank0(lambda: self._compare_settings(state, name, is_start_only=True))
        return self._must_skip_optimizer_state(state)

    def load_imported(self, folder: str, weights: Sequence[checkpoint.TensorShard]) -> None:
        """Fill this process's weights from `folder`, which checkpoint.imported names.

        The folder holds checkpoints with a step 0, or a Hugging Face model. Raises DataError if the weights are missing
        or of a different model; the run would otherwise start with random weights.
        """

        def accept(state: Mapping[str, Any], name: str) -> bool:
            self._run_check_on_rank0(lambda: self._compare_settings(state, name))
            return False  # the load fills weights only, so that no optimizer state has to be skipped

        if self.peers.compute_once(lambda: is_model_folder(folder), bool):
            self.notes += load_folder(Path(folder), weights, self.peers)
            self.notes.append(f"this run starts with the weights of the Hugging Face folder {folder}")
            return
        try:
            checkpoint.load(folder, weights, step=0, accept=accept, covers_model=True)
        except DataError as error:
            raise DataError(
                f"this start has no state to resume from, and the imported weights of checkpoint.imported={folder} "
                f"cannot replace it: {error}. Import the model again (megascale convert import), or remove "
                "checkpoint.imported from the configuration to start with random weights"
            ) from None
        self.notes.append(f"this run starts with the imported weights of {folder}")

    def claim_run(self) -> None:
        """Claim checkpoint.location, and write the run's identity, configuration and tokenizer.

        All ranks have accepted the start before. Rank 0 writes.

        Raises DataError on all ranks if a different run, started at the same moment, has claimed checkpoint.location.
        """
        self._run_check_on_rank0(self._claim_location)
        if self.peers.rank == 0:
            assert self._identity is not None
            self.run.write_accepted_start(self.config, self._identity)
            copy_tokenizer(self.run.path, self.config, self._data_hashes.get("tokenizer"))
            copy_generation_config(self.run.path, self.config)

    def _claim_location(self) -> str | None:
        """Claim checkpoint.location for this run. Return an error message if a different run has claimed it."""
        self._identity = self._identity or secrets.token_hex(8)
        if self.config.checkpoint.location is None:
            return None
        if step_folders.claim_folder(self._storage, self._identity, self._location_owner):
            return None
        return _explain_other_run(self._storage.url, "started at the same moment", self.config)

    def _run_check_on_rank0(self, check: Callable[[], str | None]) -> None:
        """Run `check` on rank 0; if it reports a problem, raise DataError on every rank."""
        problem = None
        if self.peers.rank == 0:
            try:
                problem = check()
            except (ConfigError, DataError) as error:  # the other ranks wait for the result
                problem = str(error)
        problem = self.peers.broadcast(problem, str | None)
        if problem:
            raise DataError(problem)

    @property
    def _storage(self) -> Any:
        """The storage of this run's checkpoints."""
        return open_storage(find_checkpoints(self.run.path, self.config))

    def _read_owner(self) -> None:
        """Store the owner of checkpoint.location before the state there is checked.

        `_claim_location` then detects that a different run has claimed the location since.
        """
        if self.config.checkpoint.location is not None:
            self._location_owner = step_folders.read_owner(self._storage)

    # checks of rank 0: each returns an error message, or None --------------------------------------------------------

    def _check_state(self, state: Mapping[str, Any], name: str) -> str | None:
        """Compare a state with this start. Set `changes`, `notes`, `data_changed` and `_saved_base`."""
        self.changes, self.notes = [], []
        self._read_owner()
        # Each comparison runs only if the earlier ones found no problem.
        problem = self._compare_run(state, name) or self._compare_adapters(state, name)
        problem = problem or self._compare_settings(state, name)
        changes_samples = any(change.key in setting_changes.SAMPLE_ORDER_KEYS for change in self.changes)
        dataset_differs = state.get("data") not in (None, self._data_hashes.get("data"))
        run_differs = _read_run_record(state).get("id") not in (None, self._identity)
        self.data_changed = changes_samples or dataset_differs or run_differs
        return problem

    def _compare_run(self, state: Mapping[str, Any], name: str) -> str | None:
        """Compare the run that wrote the state with this run, and set this run's identity."""
        identity = self.run.read_identity()
        saved_run = _read_run_record(state)
        saved_identity = saved_run.get("id")
        has_location = self.config.checkpoint.location is not None
        self._identity = identity
        if "run" in self.accepted_changes:
            if saved_identity not in (None, identity):
                writer = _describe_run(saved_run)
                self.notes.append(f"resuming from {name}, a checkpoint of a different run ({writer}), as accepted")
            return None
        if saved_identity is None:
            self.notes.append(f"{name} does not name its run (it was imported): this run takes it as its own")
            return None
        if identity is None and not has_location:
            # A checkpoint in a run folder is that run's, also after the folder was moved or copied.
            self._identity = saved_identity
            return None
        if saved_identity != identity:
            return _explain_other_run(name, _describe_run(saved_run), self.config)
        if has_location and self._location_owner not in ("", identity):
            return _explain_other_run(self._storage.url, "which has taken it over", self.config)
        return None

    def _compare_adapters(self, state: Mapping[str, Any], name: str) -> str | None:
        """Compare what the checkpoint's run trained with what this start trains: the whole model, or adapters.

        Set `_saved_base`, which `find_base` reads.
        """
        self._saved_base = state.get("base")
        lora = self.config.train.lora
        current = None if lora is None else lora.model_dump()
        saved = _find_section(state, "train").get("lora")
        if _sort_targets(saved) == _sort_targets(current):
            return None
        return (
            f"the checkpoint {name!r} holds {_format_lora(saved)}, and this start would train "
            f"{_format_lora(current)}; train under another --train.name with --checkpoint.start_from=RUN "
            "--checkpoint.start_state=fresh, or restore [train.lora]"
        )

    def _compare_settings(self, state: Mapping[str, Any], name: str, is_start_only: bool = False) -> str | None:
        """Compare model, tokenizer, data and other settings, and set `changes`.

        Args:
            is_start_only: whether the state is of another run, and this run only starts from it. Data and settings of
                training may then differ. Otherwise the data must be equal once training has consumed samples.
        """
        self._data_hashes = collect_hashes(self.config)
        saved_settings = state.get("config")
        must_keep_data = bool(state.get("samples")) and not is_start_only
        data_problem = None
        if must_keep_data:
            data_problem = self._compare_data(state, name)
        tokenizer_problem = self._compare_tokenizer(state, name)
        if not isinstance(saved_settings, Mapping):
            self.notes.append(f"{name} holds no configuration: only the names and shapes of its tensors are compared")
            return data_problem or tokenizer_problem
        saved, unknown = setting_changes.read_saved_config(saved_settings)
        if unknown:
            self.notes.append(f"{name} has settings that this version does not know and ignores: {', '.join(unknown)}")
        has_text = any(map(is_text, self.config.data.train))
        self.changes = setting_changes.find_changes(saved, self.config, has_trained=must_keep_data, has_text=has_text)
        refused = [change for change in self.changes if change.kind == "refused"]
        alternative = setting_changes.OTHER_RUN  # advice at the end of the message
        if is_start_only and self.config.checkpoint.start_from is not None:
            alternative = "omit --checkpoint.start_from to train the other model from random weights"
        # A changed model is reported first, since changed data or settings may follow from it.
        return (
            setting_changes.explain_changes(name, refused, self.accepted_changes, alternative)
            or tokenizer_problem
            or data_problem
            or setting_changes.explain_changes(name, self.changes, self.accepted_changes)
        )

    def _compare_data(self, state: Mapping[str, Any], name: str) -> str | None:
        """Return an error message if the data files differ from the checkpoint's, and the user has not accepted that.

        Raises DataError if the run folder's record names the files that differ.
        """
        if "data.train" in self.accepted_changes or state.get("data") in (None, self._data_hashes["data"]):
            return None
        record = self.run.samples.parent / data_checks.SOURCES_FILE
        data_checks.compare_fingerprints(record, data_checks.fingerprint_sources(self.config.data))
        return (
            f"data.train={','.join(self.config.data.train)} has changed since the checkpoint {name!r}: "
            "samples would be repeated or skipped. Restore the files, start anew with another "
            "--train.name, or accept the change with --checkpoint.accept_changes=data.train"
        )

    def _compare_tokenizer(self, state: Mapping[str, Any], name: str) -> str | None:
        """Return an error message if the checkpoint was trained with a different tokenizer."""
        saved, current = state.get("tokenizer"), self._data_hashes["tokenizer"]
        if saved is None or current is None or saved == current:
            return None
        return (
            f"the checkpoint {name!r} was trained with a different tokenizer from data.tokenizer="
            f"{find_tokenizer_path(self.config.data)} (SHA-256 {saved[:12]} in the checkpoint, {current[:12]} now): "
            "equal ids would mean different text. Pass the tokenizer that it was trained with, or train under another "
            "--train.name"
        )

    def _check_first_start(self) -> str | None:
        """Return an error message if another run owns the location, or if this run's saved state is missing."""
        self._read_owner()
        problem = self._check_owner()
        if problem:
            return problem
        self._data_hashes = collect_hashes(self.config)
        self._identity = self.run.read_identity()
        step = self.run.find_last_saved_step()
        if step is None:
            return None
        checkpoints = find_checkpoints(self.run.path, self.config)
        return (
            f"{self.run.path} had committed the checkpoint of step {step}, but {str(checkpoints)!r} has no readable "
            "checkpoint: the run would start again at step 0 and lose its metrics and ledger. Restore the checkpoints, "
            "pass their folder with --checkpoint.location, or start over from step 0 with --checkpoint.resume=false"
        )

    def _check_restart(self) -> str | None:
        """Return an error message if another run owns the location. Otherwise clear this run's identity.

        `_claim_location` then makes a new one.
        """
        self._read_owner()
        problem = self._check_owner()
        if problem:
            return problem
        # A restart is a new run, so that no later start resumes from the earlier run by mistake.
        self._data_hashes = collect_hashes(self.config)
        self._identity = None
        return None

    def _check_owner(self) -> str | None:
        """Return an error message if checkpoint.location belongs to a different run.

        A save would remove the checkpoints of that run.
        """
        if self.config.checkpoint.location is None or "run" in self.accepted_changes:
            return None
        storage = self._storage
        commits, _ = step_folders.list_commits(storage)  # newest first
        saved_run = _read_run_record(commits[0].state) if commits else {}
        owner = saved_run.get("id") or step_folders.read_owner(storage)
        if not owner or owner == self.run.read_identity():
            return None
        return _explain_other_run(storage.url, _describe_run(saved_run), self.config)


def _find_section(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the configuration in a saved state, empty if the state has none."""
    return _as_mapping(_as_mapping(state.get("config")).get(name))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sort_targets(lora: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return settings of train.lora with sorted targets, since their order has no effect."""
    return None if lora is None else {**lora, "targets": sorted(set(lora["targets"]))}


def _format_lora(lora: Mapping[str, Any] | None) -> str:
    """Return a phrase for what these settings of train.lora train."""
    if lora is None:
        return "the whole model"
    return f"adapters ({', '.join(f'{key}={value}' for key, value in lora.items())})"


def check_adapter_base(config: Config) -> None:
    """Raise ConfigError if adapters are to be trained, and their base model is not named or not in a checkpoint.

    Opens no file. Looks only whether checkpoint.imported is a Hugging Face folder.
    """
    section = config.checkpoint
    _check_base_format(config)
    if config.train.lora is not None and section.start_from is None and section.imported is None:
        raise ConfigError(
            f"train.lora.rank={config.train.lora.rank} trains adapters of an existing model, and none is named; set "
            "--checkpoint.start_from=RUN --checkpoint.start_state=fresh, or import one with `megascale convert import`"
        )


def _check_base_format(config: Config) -> None:
    """Raise ConfigError for adapters of a model in a Hugging Face folder: only a checkpoint has a fingerprint."""
    folder = config.checkpoint.imported
    if config.train.lora is None or config.checkpoint.start_from is not None or folder is None:
        return
    if is_model_folder(folder):
        raise ConfigError(
            f"train.lora.rank={config.train.lora.rank} needs a model in a checkpoint, and checkpoint.imported={folder} "
            f"(which --model.from sets) is a Hugging Face folder; run `megascale convert import {folder} --out RUN` "
            "and set --checkpoint.start_from=RUN --checkpoint.start_state=fresh"
        )


def _read_run_record(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping with id and name of the run that saved a state, empty for an imported checkpoint."""
    return state.get("run") or {}


def _describe_run(run: Mapping[str, Any]) -> str:
    if run.get("name"):
        return f"{run['name']!r}"
    return "unnamed"


def _explain_other_run(location: str, detail: str, config: Config) -> str:
    """Return the error message for a location of checkpoints that belongs to a different run."""
    shared = "a folder of checkpoints"
    if config.checkpoint.location is not None:
        shared = f"checkpoint.location={config.checkpoint.location}"
    return (
        f"{location!r} belongs to a different run ({detail}), not to {config.run_folder}: two runs that share "
        f"{shared} would resume from each other's state and remove each other's checkpoints. Give each run its own "
        "checkpoint.location, or resume from the other run's state on purpose with --checkpoint.accept_changes=run"
    )
