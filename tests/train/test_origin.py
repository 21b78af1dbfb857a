"""Checks of the state that a start resumes from: its run, data, tokenizer and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale import checkpoint
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import save
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config, from_tree
from megascale.core.events import Event
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import DataError
from megascale.train.resume import ResumeGuard
from megascale.train.run_folder import RunFolder
from megascale.train.trained_config import collect_hashes, hash_fingerprints, load_trained_config, read_tokenizer_hash
from tests.checkpoint.conftest import full_shards, logical_state


class Workspace:
    """A run folder with a data set and a tokenizer, and the starts that resume there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write_tokens("train", 40)
        train_tokenizer(["text"], 260).save(path / "tokenizer.json")
        self.folder = RunFolder(path / "runs" / "a")
        self.folder.create()

    def write_tokens(self, name: str, count: int) -> str:
        with IndexedWriter(self.path / name, "uint16") as writer:
            writer.add(np.arange(count))
        return str(self.path / name)

    def configure(self, **sections: dict[str, Any]) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "train": {"runs": str(self.path / "runs"), "name": "a"},
            "model": {"sequence_length": 8, "vocab_size": 260},
            "data": {"train": [str(self.path / "train")], "tokenizer": str(self.path / "tokenizer.json")},
        }
        for name, section in sections.items():
            tree[name] = tree.get(name, {}) | section
        return from_tree(tree)

    def start(self, **sections: dict[str, Any]) -> ResumeGuard:
        return ResumeGuard(self.configure(**sections), self.folder, Peers())

    def make_state(self, identity: str | None = "mine", **changes: Any) -> dict[str, Any]:
        """Return the record of a checkpoint of this run after 16 samples."""
        config = self.configure()
        run = None if identity is None else {"id": identity, "name": "a"}
        tree = config.model_dump(exclude_none=True)
        return {"run": run, "samples": 16, "config": tree, **collect_hashes(config)} | changes


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def set_identity(workspace: Workspace, identity: str | None) -> None:
    if identity is not None:
        workspace.folder.identity.write_text(identity + "\n")


def resume(workspace: Workspace, state: dict[str, Any], **sections: dict[str, Any]) -> ResumeGuard:
    origin = workspace.start(**sections)
    origin.check_state(state, "step-4")
    return origin


@pytest.mark.parametrize("identity", ["mine", None])
def test_a_run_resumes_from_its_own_state(workspace: Workspace, identity: str | None) -> None:
    """A run folder without an identity was moved or copied, and takes that of its checkpoints."""
    set_identity(workspace, identity)
    origin = resume(workspace, workspace.make_state())
    assert (origin.notes, origin.changes, origin.data_changed) == ([], [], False)
    assert origin.checkpoint_metadata["run"] == {"id": "mine", "name": "a"}


def test_an_imported_state_is_taken_with_a_note(workspace: Workspace) -> None:
    set_identity(workspace, "mine")
    origin = resume(workspace, workspace.make_state(identity=None))
    assert origin.notes == ["step-4 does not name its run (it was imported): this run takes it as its own"]
    assert not origin.data_changed
    origin.claim_run()
    assert workspace.folder.read_identity() == "mine"


def test_a_state_of_another_run_is_refused_unless_it_is_accepted(workspace: Workspace) -> None:
    set_identity(workspace, "mine")
    state = workspace.make_state("another")
    with pytest.raises(
        DataError, match=r"'step-4' belongs to a different run \('a'\), not to .* share a folder of checkpoints"
    ):
        resume(workspace, state)
    origin = resume(workspace, state, checkpoint={"accept_changes": ["run"]})
    assert origin.notes == ["resuming from step-4, a checkpoint of a different run ('a'), as accepted"]
    assert origin.data_changed
    accepted_start = resume(workspace, workspace.make_state(), checkpoint={"accept_changes": ["run"]})
    assert (accepted_start.notes, accepted_start.data_changed) == ([], False)
    nameless = workspace.make_state(run={"id": "another"})
    with pytest.raises(DataError, match=r"a different run \(unnamed\)"):
        resume(workspace, nameless)


@pytest.mark.parametrize(
    ("identity", "saved", "owner", "is_refused"),
    [
        ("mine", "mine", "mine", False),
        ("mine", "mine", "", False),
        ("mine", "mine", "another", True),
        (None, "mine", "mine", True),  # a location names no run folder, so that it cannot be this run's
        ("mine", "another", "another", True),
    ],
)
def test_a_location_belongs_to_one_run(
    workspace: Workspace, identity: str | None, saved: str, owner: str, is_refused: bool
) -> None:
    set_identity(workspace, identity)
    location = str(workspace.path / "shared")
    if owner:
        step_folders.claim_folder(open_storage(location), owner, "")
    origin = workspace.start(checkpoint={"location": location})
    state = workspace.make_state(saved)
    state["config"]["checkpoint"]["location"] = location
    if is_refused:
        with pytest.raises(DataError, match=f"belongs to a different run.*checkpoint.location={location} would resume"):
            origin.check_state(state, "step-4")
        return
    origin.check_state(state, "step-4")
    origin.claim_run()
    assert step_folders.read_owner(open_storage(location)) == identity


def test_of_two_runs_that_start_at_once_one_gets_the_location(workspace: Workspace) -> None:
    location = str(workspace.path / "shared")
    origin = workspace.start(checkpoint={"location": location})
    origin.check_first_start()
    step_folders.claim_folder(open_storage(location), "another", "")
    with pytest.raises(DataError, match="started at the same moment"):
        origin.claim_run()
    assert not workspace.folder.identity.exists()
    with pytest.raises(DataError, match=r"belongs to a different run \(unnamed\)"):
        workspace.start(checkpoint={"location": location}).check_first_start()
    with pytest.raises(DataError, match=r"belongs to a different run \(unnamed\)"):
        workspace.start(checkpoint={"location": location}).check_restart()
    workspace.start(checkpoint={"location": location, "accept_changes": ["run"]}).check_first_start()


def test_a_location_with_checkpoints_of_another_run_is_refused(workspace: Workspace) -> None:
    location = str(workspace.path / "shared")
    save(location, 4, full_shards(logical_state()), {"run": {"id": "another", "name": "b"}}, keep=1)
    for check in (ResumeGuard.check_first_start, ResumeGuard.check_restart):
        with pytest.raises(DataError, match=r"belongs to a different run \('b'\)"):
            check(workspace.start(checkpoint={"location": location}))
    set_identity(workspace, "another")
    workspace.start(checkpoint={"location": location}).check_first_start()


def test_a_first_start_gets_an_identity_and_a_restart_another(workspace: Workspace) -> None:
    origin = workspace.start(checkpoint={"accept_changes": ["train.seed"]})
    origin.check_first_start()
    assert origin.checkpoint_metadata["run"]["id"] is None
    origin.claim_run()
    first = workspace.folder.read_identity()
    assert first is not None
    assert len(first) == 16
    assert origin.checkpoint_metadata["run"] == {"id": first, "name": "a"}
    assert origin.checkpoint_metadata["config"]["checkpoint"]["accept_changes"] == []
    hashes = collect_hashes(origin.config)
    assert hashes.items() <= origin.checkpoint_metadata.items()
    assert None not in hashes.values()
    second_start = workspace.start()
    second_start.check_first_start()
    second_start.claim_run()
    assert workspace.folder.read_identity() == first
    anew = workspace.start()
    anew.check_restart()
    anew.claim_run()
    assert workspace.folder.read_identity() not in (None, first)


def test_a_run_that_lost_its_checkpoints_does_not_start_over(workspace: Workspace) -> None:
    workspace.folder.append_event(Event.CHECKPOINT_SAVED, step=4)
    with pytest.raises(DataError, match=r"had committed the checkpoint of step 4, but .*checkpoints' has no readable"):
        workspace.start().check_first_start()
    workspace.start().check_restart()


def test_other_data_is_refused_unless_it_is_accepted(workspace: Workspace) -> None:
    state = workspace.make_state()
    workspace.write_tokens("train", 41)
    with pytest.raises(DataError, match=r"data\.train=.*train has changed since the checkpoint 'step-4'"):
        resume(workspace, state)
    assert resume(workspace, state, checkpoint={"accept_changes": ["data.train"]}).data_changed
    # Before the first sample other data is no change.
    assert resume(workspace, state | {"samples": 0}).data_changed
    assert not resume(workspace, state | {"data": None}).data_changed


def test_another_tokenizer_is_refused(workspace: Workspace) -> None:
    state = workspace.make_state()
    train_tokenizer(["other text"], 261).save(workspace.path / "tokenizer.json")
    with pytest.raises(
        DataError, match=rf"different tokenizer from data\.tokenizer=.*SHA-256 {state['tokenizer'][:12]}"
    ):
        resume(workspace, state)
    resume(workspace, state | {"tokenizer": None})
    (workspace.path / "tokenizer.json").unlink()
    resume(workspace, state)  # it cannot be compared


def test_changed_settings_are_refused_asked_for_or_kept(workspace: Workspace) -> None:
    state = workspace.make_state()
    with pytest.raises(DataError, match=r"of another model: model\.hidden"):
        resume(workspace, state, model={"hidden": 512})
    with pytest.raises(DataError, match=r"train\.seed was .*accept_changes=train\.seed"):
        resume(workspace, state, train={"seed": 77})
    accepted = resume(workspace, state, train={"seed": 77}, checkpoint={"accept_changes": ["train.seed"]})
    assert ([change.key for change in accepted.changes], accepted.data_changed) == (["train.seed"], True)
    free = resume(workspace, state, lr={"peak": 0.5})
    assert ([change.key for change in free.changes], free.data_changed) == (["lr.peak"], False)
    begun = resume(workspace, state | {"samples": 0}, train={"seed": 77})
    assert [change.kind for change in begun.changes] == ["free"]
    del state["config"]
    plain = resume(workspace, state, model={"hidden": 512})
    assert plain.notes == ["step-4 holds no configuration: only the names and shapes of its tensors are compared"]


def test_unknown_settings_are_noted(workspace: Workspace) -> None:
    state = workspace.make_state()
    state["config"]["train"]["gone"] = 1
    note = "step-4 has settings that this version does not know and ignores: train.gone"
    assert resume(workspace, state).notes == [note]


def test_another_optimizer_is_told(workspace: Workspace) -> None:
    state = workspace.make_state()
    assert workspace.start().check_state(state, "step-4") is False
    accepted = {"optimizer": {"name": "muon"}, "checkpoint": {"accept_changes": ["optimizer.name"]}}
    assert workspace.start(**accepted).check_state(state, "step-4") is True
    del state["config"]
    assert workspace.start(**accepted).check_state(state, "step-4") is False


def test_imported_weights_are_loaded_with_a_note_or_refused(workspace: Workspace) -> None:
    folder = str(workspace.path / "imported")
    shards = [shard for shard in full_shards(logical_state()) if shard.name.startswith("model.")]
    state = {"config": workspace.configure().model_dump(exclude_none=True)}
    for tensors, step in ((shards, 0), (full_shards(logical_state(5)), 3)):
        save(folder, step, tensors, state, keep=2)
    origin = workspace.start()
    blank = [checkpoint.TensorShard(s.name, s.shape, s.offsets, s.tensor.clone().zero_()) for s in shards]
    origin.load_imported(folder, blank)
    assert all(bool((a.tensor == b.tensor).all()) for a, b in zip(blank, shards, strict=True))
    assert origin.notes[-1] == f"this run starts with the imported weights of {folder}"
    with pytest.raises(DataError, match=rf"checkpoint\.imported={folder} cannot replace it: .*of another model"):
        workspace.start(model={"hidden": 512}).load_imported(folder, blank)
    with pytest.raises(DataError, match=r"start with random weights"):
        origin.load_imported(folder, blank[:-1])


def test_a_trained_model_is_read_with_the_settings_of_its_checkpoint(workspace: Workspace) -> None:
    """Model and precision are the checkpoint's; its data section counts where its tokenizer does."""
    folder = workspace.folder
    trained = workspace.configure(train={"precision": "float32"}, model={"hidden": 128})
    state = workspace.make_state(config=trained.model_dump(exclude_none=True))
    for step, changes in ((3, {"tokenizer": "of step 3"}), (4, {})):
        save(folder.checkpoints, step, full_shards(logical_state()), state | changes, keep=2)
    second_tokenizer = workspace.path / "other.json"
    train_tokenizer(["other text"], 261).save(second_tokenizer)
    folder.write_accepted_start(
        workspace.configure(data={"tokenizer": str(second_tokenizer)}, train={"seed": 9}), "mine"
    )
    config, accept = load_trained_config(folder.path)
    assert (config.model.hidden, config.train.precision, config.train.seed) == (128, "float32", 9)
    assert config.data.tokenizer == str(workspace.path / "tokenizer.json")
    assert accept(state, "step-4") is False
    assert accept({}, "step-4") is False
    wider = workspace.make_state(config=workspace.configure(model={"hidden": 512}).model_dump(exclude_none=True))
    with pytest.raises(DataError, match=r"model\.hidden was 512 and is 128.*\(--step chooses a checkpoint\)"):
        accept(wider, "step-5")
    assert load_trained_config(folder.path, 3)[0].data.tokenizer == str(second_tokenizer)
    assert read_tokenizer_hash(folder.path, config) == state["tokenizer"]
    assert read_tokenizer_hash(folder.path, config, 3) == "of step 3"
    assert read_tokenizer_hash(folder.path, config, 5) is None


def test_the_order_of_files_is_part_of_their_hash() -> None:
    assert hash_fingerprints(["a", "b"]) != hash_fingerprints(["b", "a"])
    assert hash_fingerprints(["a", "b"]) == hash_fingerprints(iter(["a", "b"]))
    assert len(hash_fingerprints([])) == 32
