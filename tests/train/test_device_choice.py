"""A device that is not there is refused before any work."""

from __future__ import annotations

import pytest
import torch

from megascale.errors import ConfigError
from megascale.train.rank_info import choose_device

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["generate", "runs/tiny", "--device", "cuda"], "--device=cuda"),
        (["generate", "runs/tiny", "--device", "gpu"], "--device=gpu is unknown"),
        (["evaluate", "runs/tiny", "--device", "cuda:1"], "--device=cuda:1"),
        (["simulate", "measure", "--device", "cuda"], "--device=cuda"),
        (["train", "{tiny}", "--train.device=cuda"], "train.device=cuda"),
        (["train", "{tiny}", "--train.device=cuda", "--parallel.data=2"], "train.device=cuda"),
        (["launch", "{tiny}", "--train.device=cuda", "--nodes", "2"], "train.device=cuda"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_gpu_that_is_not_there_is_refused_before_any_work(tiny, megascale, tmp_path, arguments, name):
    done = megascale(*[word.format(tiny=tiny) for word in arguments], env=NO_GPU)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs" / "tiny" / "config.toml").exists()


def test_measurements_refuse_a_gpu_that_is_not_there(benchmarks, chaos):
    for done in (
        benchmarks("observe", "--parts", "stragglers", "--device", "cuda", env=NO_GPU),
        chaos("hang", "--device", "cuda", env=NO_GPU),
    ):
        assert done.returncode == 2, done.stderr
        assert "--device=cuda" in done.stderr


def test_a_dry_run_says_that_the_gpu_is_not_there(tiny, megascale):
    done = megascale("train", tiny, "--train.device=cuda", "--dry-run", env=NO_GPU)
    assert "would be refused here: train.device=cuda" in done.stdout


def test_the_named_device_is_chosen(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    for name in ("cuda:2", "cuda:", "cuda:-1", "cuda1", "mps", ""):
        with pytest.raises(ConfigError, match="--device="):
            choose_device(name)
