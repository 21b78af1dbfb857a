"""What a start may go on from: this run's own state, of this model, tokenizer and data, with settings that may differ.

Judged by rank 0 before a byte of a checkpoint is read, told to all. Until a start is accepted nothing in the run
folder changes but its log of events and status files.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.checkpoint import setting_changes
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.setting_changes import Change
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config
from megascale.data.dataset import fingerprint, tokenizer_agreement
from megascale.data.dataset.file_hash import even_part
from megascale.data.dataset.formats import is_text
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import tokenizer_for, tokenizer_path
from megascale.errors import ConfigError, DataError
from megascale.train.run_folder import RunFolder, checkpoint_folder, find_paths, run_config
from megascale.train.run_tokenizer import find_tokenizer, keep_tokenizer

if TYPE_CHECKING:
    from megascale.checkpoint.loader import Accept


class Origin:
    """Where this start's state comes from. Every method is collective, the attributes are rank 0's.

    Attributes:
        changes: settings that differ from those of the checkpoint.
        notes: what a person should know, a sentence each.
        has_other_samples: whether samples have other tokens than before, as a person has accepted.
    """

    def __init__(self, config: Config, run: RunFolder, peers: Peers) -> None:
        self.config, self.run, self.peers = config, run, peers
        self.accepted = config.checkpoint.accept_changes
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.has_other_samples = False
        self._identity: str | None = None
        self._location_owner = ""  # when this start was judged
        self._facts: dict[str, Any] = {}

    @property
    def about(self) -> dict[str, Any]:
        """What each checkpoint of this run says of it: identity, hashes of data and tokenizer, settings."""
        section = self.config.checkpoint.model_copy(update={"accept_changes": []})
        config = self.config.model_copy(update={"checkpoint": section})
        return {
            "run": {"id": self._identity, "name": self.config.train.name},
            **self._facts,
            "config": config.model_dump(exclude_none=True),
        }

    def check(self, state: Mapping[str, Any], name: str) -> bool:
        """Return whether the optimizer is another one than the saved state's.

        Raises DataError on all ranks if the run may not go on from that state. `name`: what to call the checkpoint.
        """
        self._tell(lambda: self._judge(state, name))
        present = self.config.optimizer.name
        return bool(_saved_section(state, "optimizer").get("name", present) != present)

    def check_nothing(self) -> None:
        """As `check`, where there is no state and the run begins at step 0."""
        self._tell(self._judge_nothing)

    def check_anew(self) -> None:
        """As `check`, where checkpoint.resume=false begins at step 0 whatever there is."""
        self._tell(self._judge_anew)

    def check_imported(self, state: Mapping[str, Any], name: str) -> bool:
        """Check the model and the tokenizer of imported weights; return False, since no optimizer state is loaded."""
        self._tell(lambda: self._wrong_settings(state, name))
        return False

    def _read_owner(self) -> None:
        """Keep whose checkpoint.location is before anything there is judged: a claim since then is seen."""
        if self.config.checkpoint.location is not None:
            self._location_owner = step_folders.owner(self._storage)

    def accept(self) -> None:
        """Keep the run's identity and configuration: all ranks have accepted the start.

        DataError on all ranks if another run, which started at the same moment, was given checkpoint.location.
        """
        self._tell(self._claim_location)
        if self.peers.rank == 0:
            assert self._identity is not None
            self.run.accept(self.config, self._identity)
            keep_tokenizer(self.run.path, self.config, self._facts.get("tokenizer"))

    def _claim_location(self) -> str | None:
        self._identity = self._identity or secrets.token_hex(8)
        if self.config.checkpoint.location is None:
            return None
        if step_folders.claim_folder(self._storage, self._identity, self._location_owner):
            return None
        return _of_another(self._storage.url, "started at the same moment", self.config)

    def _tell(self, judge: Callable[[], str | None]) -> None:
        problem = None
        if self.peers.rank == 0:
            try:
                problem = judge()
            except (ConfigError, DataError) as error:  # the others wait for an answer
                problem = str(error)
        if problem := self.peers.broadcast(problem, str | None):
            raise DataError(problem)

    @property
    def _storage(self) -> Any:
        return open_storage(checkpoint_folder(self.run.path, self.config))

    def _judge(self, state: Mapping[str, Any], name: str) -> str | None:
        self.changes, self.notes = [], []
        self._read_owner()
        problem = self._wrong_run(state, name) or self._wrong_settings(state, name)
        self.has_other_samples = (
            any(change.key in setting_changes.CHANGES_SAMPLES for change in self.changes)
            or state.get("data") not in (None, self._facts.get("data"))
            or (state.get("run") or {}).get("id") not in (None, self._identity)
        )
        return problem

    def _wrong_run(self, state: Mapping[str, Any], name: str) -> str | None:
        mine, its = self.run.read_identity(), state.get("run") or {}
        elsewhere = self.config.checkpoint.location is not None
        self._identity = mine
        if "run" in self.accepted:
            if its.get("id") not in (None, mine):
                self.notes.append(f"going on from {name}, a checkpoint of another run ({_called(its)}), as accepted")
            return None
        if its.get("id") is None:
            if elsewhere and (problem := self._wrong_name(state, name)):
                return problem
            self._note_unnamed(name)
            return None
        if mine is None and not elsewhere:
            self._identity = its["id"]  # checkpoints in a run folder are that run's, as when it was moved or copied
            return None
        if its["id"] != mine:
            return _of_another(name, _called(its), self.config)
        if elsewhere and self._location_owner not in ("", mine):
            return _of_another(self._storage.url, "which has taken it over", self.config)
        return None

    def _wrong_name(self, state: Mapping[str, Any], name: str) -> str | None:
        """An older version's checkpoint in a place that several runs may share: only names can tell them apart."""
        saved = (state.get("config") or {}).get("train") or {}
        if saved.get("name", self.config.train.name) != self.config.train.name:
            return _of_another(name, repr(saved["name"]), self.config)
        return None

    def _note_unnamed(self, name: str) -> None:
        self.notes.append(
            f"{name} does not say of which run it is (an older version's, or imported): taken as this one's"
        )

    def _wrong_settings(self, state: Mapping[str, Any], name: str) -> str | None:
        tree = state.get("config")
        begun = bool(state.get("samples"))
        self._facts = facts(self.config)
        problem = self._wrong_data(state, name) if begun else None
        if not isinstance(tree, Mapping):
            self.notes.append(f"{name} keeps no configuration: only the names and shapes of its tensors are compared")
            return problem or self._wrong_tokenizer(state, None, name)
        saved, unknown = setting_changes.read_saved(tree)
        if unknown:
            self.notes.append(f"{name} has settings that this version does not know and ignores: {', '.join(unknown)}")
        text = any(map(is_text, self.config.data.train))
        self.changes = setting_changes.find_changes(saved, self.config, begun=begun, text=text)
        return (
            setting_changes.explain_changes(name, [c for c in self.changes if c.kind == "refused"], self.accepted)
            or self._wrong_tokenizer(state, saved, name)
            or problem
            or (self._other_files(saved, name) if begun and "data" not in state else None)
            or setting_changes.explain_changes(name, self.changes, self.accepted)
        )

    def _wrong_data(self, state: Mapping[str, Any], name: str) -> str | None:
        if "data.train" in self.accepted or state.get("data") in (None, self._facts["data"]):
            return None
        present = fingerprint.fingerprints(self.config)
        if state["data"] == data_hash(map(even_part, present.values())):
            return None  # an older version's checkpoint knows fewer places of the files
        # The run folder's record, where there is one, names the files; it is a DataError of its own.
        fingerprint.compare_fingerprints(self.run.samples.parent / fingerprint.NAME, present)
        return (
            f"data.train={','.join(self.config.data.train)} has other contents than the checkpoint {name!r} was "
            "trained with: samples would be repeated or skipped. Put the files back, begin anew with another "
            "--train.name, or accept it with --checkpoint.accept_changes=data.train"
        )

    def _other_files(self, saved: Config, name: str) -> str | None:
        """An older version's checkpoint has no hash of its data; without a record in the run folder paths must do."""
        if (self.run.samples.parent / fingerprint.NAME).exists() or "data.train" in self.accepted:
            return None
        there, here = saved.data.train, self.config.data.train
        if there == here:
            return None
        return (
            f"the checkpoint {name!r} was trained on data.train={','.join(there)} and this start has "
            f"{','.join(here)}. Name the files that it began with, or accept it with "
            "--checkpoint.accept_changes=data.train"
        )

    def _wrong_tokenizer(self, state: Mapping[str, Any], saved: Config | None, name: str) -> str | None:
        there, here = state.get("tokenizer"), self._facts["tokenizer"]
        if there is None and saved is not None:
            there = tokenizer_hash(saved)
        if there is None or here is None or there == here:
            return None
        return (
            f"the checkpoint {name!r} was trained with another tokenizer than data.tokenizer="
            f"{tokenizer_path(self.config.data)} (SHA-256 {there[:12]} there, {here[:12]} here): "
            "equal ids would mean different text. Name the tokenizer that it was trained with, or train under another "
            "--train.name"
        )

    def _judge_nothing(self) -> str | None:
        self._read_owner()
        if problem := self._wrong_owner():
            return problem
        self._facts, self._identity = facts(self.config), self.run.read_identity()
        step = self.run.saved_before()
        if step is None:
            return None
        place = checkpoint_folder(self.run.path, self.config)
        return (
            f"{self.run.path} had committed the checkpoint of step {step}, and in {str(place)!r} there is none that "
            "can be read: the run would begin again at step 0, its metrics and ledger be lost. Put the checkpoints "
            "back, name their folder with --checkpoint.location, or start over from step 0 with "
            "--checkpoint.resume=false"
        )

    def _judge_anew(self) -> str | None:
        self._read_owner()
        if problem := self._wrong_owner():
            return problem
        # What is begun anew is another run: the one before must not be gone on from by mistake.
        self._facts, self._identity = facts(self.config), None
        return None

    def _wrong_owner(self) -> str | None:
        """A place outside the run folder that belongs to another run: saving there would remove its checkpoints."""
        if self.config.checkpoint.location is None or "run" in self.accepted:
            return None
        mine, storage = self.run.read_identity(), self._storage
        commit = next(iter(step_folders.survey(storage)[0]), None)
        its = (commit.state.get("run") or {}) if commit is not None else {}
        owner = its.get("id") or step_folders.owner(storage)
        if not owner and commit is not None:
            return self._wrong_name(commit.state, f"{storage.url}/{step_folders.step_name(commit.step)}")
        return _of_another(storage.url, _called(its), self.config) if owner and owner != mine else None


def trained_tokens(state: Mapping[str, Any], sequence_length: int) -> int:
    """Return the tokens that were trained up to a saved state.

    Older versions saved samples only: their length is that of the saved configuration, or else `sequence_length`.
    """
    if "tokens" in state:
        return int(state["tokens"])
    saved = _saved_section(state, "model").get("sequence_length", sequence_length)
    return int(state.get("samples", 0)) * int(saved)


def _saved_section(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the configuration in a saved state, empty if the state has none."""
    tree = state.get("config")
    section = tree.get(name) if isinstance(tree, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def trained_config(run: Path, step: int | None = None) -> tuple[Config, Accept]:
    """The configuration that the checkpoint of `step` (default: the newest) was trained with, and what refuses another.

    The model and its precision are the checkpoint's own, whatever config.toml says; the rest is config.toml's, unless
    that is of another model (an older version wrote it even where a start was refused).
    """
    config = run_config(run)
    commits = step_folders.survey(open_storage(checkpoint_folder(run, config)))[0]
    commit = next((c for c in commits if step in (None, c.step)), None)
    tree = commit.state.get("config") if commit is not None else None
    if commit is None or not isinstance(tree, Mapping):
        return config, lambda state, name: False
    saved, _ = setting_changes.read_saved(tree)
    foreign = any(c.kind == "refused" for c in setting_changes.find_changes(saved, config, begun=False))
    train = config.train.model_copy(update={"precision": saved.train.precision})
    saved = find_paths(saved, run)
    data = saved.data if foreign else config.data
    wanted = commit.state.get("tokenizer")
    if wanted is not None and tokenizer_hash(config.model_copy(update={"data": data})) != wanted:
        other = saved.data if data is config.data else config.data
        data = other if tokenizer_hash(config.model_copy(update={"data": other})) == wanted else data
    config = config.model_copy(update={"model": saved.model, "train": train, "data": data})

    def same(state: Mapping[str, Any], name: str) -> bool:
        other = state.get("config")
        if isinstance(other, Mapping):
            found = setting_changes.find_changes(setting_changes.read_saved(other)[0], config, begun=False)
            if problem := setting_changes.explain_changes(name, [c for c in found if c.kind == "refused"], ()):
                raise DataError(f"{problem} (--step chooses a checkpoint)")
        return False

    return config, same


def trained_tokenizer(run: Path, config: Config, step: int | None = None) -> tuple[Path, Tokenizer]:
    """Return the tokenizer that the checkpoint of `step` (default: the newest) was trained with, and its file.

    Raises DataError or ConfigError, as `find_tokenizer`.
    """
    return find_tokenizer(run, config, trained_tokenizer_hash(run, config, step))


def trained_tokenizer_hash(run: Path, config: Config, step: int | None = None) -> str | None:
    """Return the SHA-256 of the tokenizer that a checkpoint was trained with, None where nothing is known of one."""
    commits = step_folders.survey(open_storage(checkpoint_folder(run, config)))[0]
    commit = next((c for c in commits if step in (None, c.step)), None)
    saved = commit.state.get("tokenizer") if commit is not None else None
    if saved is not None:
        return str(saved)
    begun_with = tokenizer_agreement.read_identity(run)
    return begun_with.sha256 if begun_with is not None else None


def facts(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of its data: a hash of all files' fingerprints in order, and the tokenizer's."""
    data = data_hash(fingerprint.fingerprints(config).values())
    return {"data": data, "tokenizer": tokenizer_hash(config)}


def data_hash(fingerprints: Iterable[str]) -> str:
    """Return a hash of the fingerprints of all data files in order."""
    return hashlib.blake2b(json.dumps(list(fingerprints)).encode(), digest_size=16).hexdigest()


def tokenizer_hash(config: Config) -> str | None:
    """SHA-256 of the tokenizer of a configuration, None if it cannot be read."""
    try:
        return tokenizer_for(config.data).sha256
    except (ConfigError, DataError):
        return None


def _called(run: Mapping[str, Any]) -> str:
    return f"{run['name']!r}" if run.get("name") else "without a name"


def _of_another(place: str, called: str, config: Config) -> str:
    return (
        f"{place!r} is of another run ({called}) than {config.run_folder}: two runs that share "
        f"checkpoint.location={config.checkpoint.location or 'their folder'} would go on from each other's state and "
        "remove each other's checkpoints. Give each run its own checkpoint.location, or go on from the other's state "
        "on purpose with --checkpoint.accept_changes=run"
    )
