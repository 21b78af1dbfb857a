"""Crafted checkpoints are refused by every reader, with a sentence and no more memory than their size."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megascale.checkpoint import inspect, load, save
from megascale.checkpoint.complete_checkpoint import open_checkpoint
from megascale.checkpoint.conversion import export_torch
from megascale.checkpoint.format.step_folders import list_commits, prune, steps
from megascale.checkpoint.format.verify import verify
from megascale.checkpoint.storage.opening import open_storage
from megascale.cli.main import app
from megascale.errors import DataError
from tests.chaos.fuzz.crafted_checkpoints import CRAFTED, _rename, bomb, edit_commit, edit_index
from tests.checkpoint.conftest import blank, full_shards, logical_state

ROOM = 64 << 20  # bytes that reading a crafted checkpoint may take


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with an intact checkpoint of step 1."""
    run = tmp_path_factory.mktemp("run")
    save(run / "checkpoints", 1, full_shards(logical_state()), {"step": 1}, keep=1)
    return run


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_checkpoint_is_refused_by_all(how: str, sound: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    CRAFTED[how](run / "checkpoints" / "step-1")
    tracemalloc.start()
    try:
        assert not inspect(run).committed
        assert verify(open_storage(run / "checkpoints"), 1).problems
        for read in (
            lambda: load(run / "checkpoints", full_shards(blank(logical_state()))),
            lambda: export_torch(open_checkpoint(run), tmp_path / "out.pt", {"optimizer.step": "step"}),
        ):
            with pytest.raises(DataError) as caught:
                read()
            assert "\n" not in str(caught.value)
            assert str(caught.value).isprintable()
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    list_commits(open_storage(run / "checkpoints"))
    prune(run / "checkpoints", 1)
    assert not (tmp_path / "out.pt").exists()


def test_the_sound_one_is_read_by_all(sound: Path, tmp_path: Path) -> None:
    assert inspect(sound).committed
    assert not verify(open_storage(sound / "checkpoints"), 1).problems
    got = blank(logical_state())
    assert load(sound / "checkpoints", full_shards(got)) == {"step": 1}
    export_torch(open_checkpoint(sound), tmp_path / "out.pt", {"optimizer.step": "step"})
    assert torch.load(tmp_path / "out.pt")["step"] == 7
    assert steps(sound / "checkpoints") == [1]


def test_the_bomb_is_small(sound: Path, tmp_path: Path) -> None:
    """Else refusing it by its length would do."""
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    bomb(run / "checkpoints" / "step-1")
    index = next((run / "checkpoints" / "step-1").glob("*-index.npz"))
    assert index.stat().st_size < 1 << 20


def test_what_a_checkpoint_says_drives_no_terminal(sound: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run"))
    location = run / "checkpoints" / "step-1"
    state = {"a": "[/red]\x1b]0;owned\x07", "[/]": "\\", "config": {"model": 5, "train": {"[/b]": "\x1b[2J"}}}
    edit_commit(location, lambda record: {**record, "state": state})
    edit_index(location, lambda header, columns: _rename(header, "[/red]"))
    (run / "config.toml").write_text("[train]\nsteps = 1\n")
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(run)])
    assert result.exit_code == 0, result.output
    assert "\x1b]" not in result.output
    assert "\x1b[2J" not in result.output
    assert "[/red]" in result.output
    edit_commit(location, lambda record: {**record, "generation": "[/red]"})
    result = CliRunner().invoke(app, ["checkpoint", "inspect", str(run)])
    assert result.exit_code == 0, result.output
