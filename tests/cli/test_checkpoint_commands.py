"""`megascale checkpoint COMMAND` on runs and folders of weights."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from megascale.checkpoint import TensorShard, load, save, steps
from megascale.checkpoint.format.step_folders import COMMIT, find_steps, read_commit, read_index
from megascale.cli.main import app
from megascale.errors import ConfigError, DataError
from tests.checkpoint.conftest import assert_same, blank, cut, full_shards, logical_state
from tests.forked import Forked


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two committed steps, saved as by three processes."""
    folder = tmp_path / "run"
    for step in (10, 20):
        tensors = logical_state(step)
        shards = [s for rank in range(3) for s in cut(tensors, "flat", rank, 3) if s.shape or rank == 0]
        config = {"model": {"hidden": 12, "layers": 1}, "train": {"steps": 50}}
        save(folder / "checkpoints", step, shards, {"step": step, "samples": step * 8, "config": config}, keep=3)
    (folder / "config.toml").write_text("[model]\nhidden = 12\nlayers = 1\n[train]\nsteps = 60\n")
    return folder


def call(*arguments: Any) -> str:
    """Run a command and return its output. Raises the exceptions that `main` turns into messages."""
    result = CliRunner().invoke(
        app, ["checkpoint"] + [str(argument) for argument in arguments], catch_exceptions=False, standalone_mode=False
    )
    return result.output


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step-20"])
def test_inspect_finds_its_way(run: Path, where: str) -> None:
    text = call("inspect", run / where)
    for word in ("model.layers.0.cube", "5 x 4 x 6", "bfloat16", "committed", "samples: 160", "train.steps"):
        assert word in text, text
    record = json.loads(call("inspect", run / where, "--json"))
    assert record["step"] == 20
    assert record["differences"] == {"train.steps": [50, 60]}
    assert {t["name"]: t["bytes"] for t in record["tensors"]}["model.embedding.weight"] == 37 * 12 * 4


def test_an_empty_table_does_not_count_as_a_difference(run: Path) -> None:
    tensors = logical_state(30)
    shards = list(cut(tensors, "flat", 0, 1))
    config = {"model": {"hidden": 12, "layers": 1, "layer_kinds": {}}, "train": {"steps": 60}}
    save(run / "checkpoints", 30, shards, {"step": 30, "samples": 240, "config": config}, keep=3)
    assert "configuration: as in config.toml" in call("inspect", run)


def test_inspect_reports_incomplete_steps(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-20" / COMMIT).unlink()
    assert "did not finish" in call("inspect", run)
    with pytest.raises(DataError, match="there is no checkpoint in"):
        call("inspect", tmp_path)


def test_verify_names_file_and_tensor(run: Path) -> None:
    assert call("verify", run).count("as written") == 2
    storage, _ = find_steps(run)
    index = read_index(storage, read_commit(storage, 10))
    row = index.rows("model.embedding.weight")[0]
    path = run / "checkpoints" / "step-10" / index.file(row)
    data = bytearray(path.read_bytes())
    data[index.columns["data"][row]] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"1 of 2 checkpoints .* not complete: step 10"):
        call("verify", run)
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(run), "--json"])
    damaged = json.loads(result.stdout)[0]
    assert damaged["tensors"] == ["model.embedding.weight"]
    assert path.name in damaged["problems"][0]


def test_prune_keeps_the_newest(run: Path) -> None:
    assert "removed steps [10]; kept [20]" in call("prune", run, "--keep", "1")
    assert steps(run / "checkpoints") == [20]
    (run / "checkpoints" / "step-20" / COMMIT).unlink()
    with pytest.raises(DataError, match="nothing was removed"):
        call("prune", run)
    assert (run / "checkpoints" / "step-20").is_dir()


def test_prune_removes_a_link_and_not_where_it_leads(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-10").rename(tmp_path / "moved")
    (run / "checkpoints" / "step-10").symlink_to(tmp_path / "moved")
    stored = sorted(file.name for file in (tmp_path / "moved").iterdir())
    output = call("prune", run, "--keep", "1")
    assert "removed steps none; removed the links of steps [10], whose target folders stay; kept [20]" in output
    assert not (run / "checkpoints" / "step-10").is_symlink()
    assert sorted(file.name for file in (tmp_path / "moved").iterdir()) == stored


@pytest.mark.parametrize("form", ["folder", "shards", "file.pt"])
def test_export_and_import_round_trip(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / form
    arguments = ["--shard-gb", "0.001"] if form == "folder" else []
    call("export", run, out, "--step", "10", *arguments)
    weights = {n.removeprefix("model."): t for n, t in logical_state(10).items() if n.startswith("model.")}
    if form != "file.pt":
        from safetensors.torch import load_file

        assert_same(load_file(out / "model.safetensors"), weights)
    call("import", out, tmp_path / "new", "--step", "3")
    got = {n: torch.zeros_like(t) for n, t in logical_state().items() if n.startswith("model.")}
    assert load(tmp_path / "new", full_shards(got))["step"] == 3
    assert_same({n.removeprefix("model."): t for n, t in got.items()}, weights)
    with pytest.raises(ConfigError, match=r"use one of model\., optimizer\."):
        call("export", run, out, "--only", "weights.")


def test_an_export_refuses_the_name_of_a_file_that_would_become_a_folder(run, tmp_path):
    out = tmp_path / "weights.safetensors"
    with pytest.raises(ConfigError, match=r"the export makes a folder .* use '.*/weights', or '.*/weights\.pt'"):
        call("export", run, out)
    assert not out.exists()


def test_a_folder_holds_one_set_of_weights(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("export", run, out)
    with pytest.raises(ConfigError, match=r"out' already has model\.safetensors"):
        call("export", run, out, "--shard-gb", "0.001")
    (out / "model-00001-of-00001.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    with pytest.raises(DataError, match="more than once"):
        call("import", out, tmp_path / "new")


def test_export_in_several_files(tmp_path: Path) -> None:
    tensors = {f"model.w{i}": torch.randn(100_000) for i in range(6)}
    save(tmp_path / "c", 1, full_shards(tensors), {}, keep=1)
    call("export", tmp_path / "c", tmp_path / "out", "--shard-gb", "0.001")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2_400_000
    assert len(set(index["weight_map"].values())) == 3
    call("import", tmp_path / "out", tmp_path / "back")
    got = blank(tensors)
    load(tmp_path / "back", full_shards(got))
    assert_same(got, tensors)


def test_import_of_a_plain_torch_checkpoint(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "b": {"c": torch.arange(4)}}
    dcp.save(tensors, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    call("import", tmp_path / "dcp", tmp_path / "new", "--prefix", "")
    got = {"a": torch.zeros(5, 3), "b.c": torch.zeros(4, dtype=torch.int64)}
    load(tmp_path / "new", [TensorShard(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in got.items()])
    assert torch.equal(got["a"], tensors["a"])
    assert torch.equal(got["b.c"], torch.arange(4))


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("taken over",)


def test_import_unpickles_tensors_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(DataError, match=r"names builtins\.print"):
        call("import", tmp_path / "dcp", tmp_path / "new")
    torch.save({"a": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(DataError, match="not a file of tensors"):
        call("import", tmp_path / "evil.pt", tmp_path / "new")
    (tmp_path / "x.safetensors").write_bytes(b"123")
    with pytest.raises(DataError, match="not a safetensors file"):
        call("import", tmp_path / "x.safetensors", tmp_path / "new")
    assert "taken over" not in capfd.readouterr().out


def test_reshard_changes_files_not_tensors(run: Path, tmp_path: Path) -> None:
    call("reshard", run, tmp_path / "new", "--files", "5")
    assert len(list((tmp_path / "new" / "step-20").glob("*.distcp"))) == 5
    got = blank(logical_state())
    assert load(tmp_path / "new", full_shards(got))["samples"] == 160
    assert_same(got, logical_state(20))
    call("reshard", run, "memory://copy", "--step", "10")
    got = blank(logical_state())
    load("memory://copy", full_shards(got))
    assert_same(got, logical_state(10))


def test_a_fallback_to_an_earlier_checkpoint_is_reported_once(tmp_path: Path) -> None:
    """Check that the warning for callers of the Python interface does not repeat the line."""
    before = "from megascale.cli import main; from megascale.checkpoint import loader; "
    before += "main._make_app = lambda: lambda: loader.warn('went back to step 3')"
    process = Forked(["checkpoint", "inspect", tmp_path], before=before)
    assert process.communicate(timeout=60)[0].splitlines() == ["went back to step 3"]
    assert process.returncode == 0
