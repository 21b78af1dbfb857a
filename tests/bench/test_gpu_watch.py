"""`megascale bench train --watch`: lines of nvidia-smi, the end of its process, and the summary of samples."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megascale.bench import gpu_watch
from megascale.bench import train as train_bench
from megascale.errors import ConfigError, TrainingError


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that puts a script nvidia-smi first on PATH, which writes its process ID and arguments."""

    def make(script: str) -> Path:
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir()
        file.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\necho "$@" > "{tmp_path}/arguments"\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
        return tmp_path

    return make


def has_ended(folder: Path) -> bool:
    try:
        os.kill(int((folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("1755, 690.12, 45\n", (1755.0, 690.12, 45.0)),
        ("1755, [N/A], [Not Supported]", (1755.0, None, None)),
        ("1755, 690.12", None),
        ("No devices were found", None),
        ("a, b, c", None),
        ("", None),
    ],
)
def test_lines(line, values):
    assert gpu_watch.parse_values(line) == values


def test_samples_are_taken_until_the_end_of_the_steps(smi):
    folder = smi("printf '1755, 690.1, 45\\n1740, [N/A], 61\\n'; exec sleep 600")
    began = time.perf_counter()
    with gpu_watch.GpuWatch("GPU-abc") as watched:
        assert not has_ended(folder)
    assert has_ended(folder)
    assert watched.error is None
    result = watched.list_samples(began)
    assert [sample[1:] for sample in result] == [[1755.0, 690.1, 45.0], [1740.0, None, 61.0]]
    assert 0 <= result[0][0] <= result[1][0]
    assert watched.list_samples(time.perf_counter()) == []
    arguments = (folder / "arguments").read_text()
    assert "-i GPU-abc" in arguments
    assert "clocks.sm,power.draw,temperature.gpu" in arguments


def test_the_child_ends_with_steps_that_fail(smi):
    folder = smi("echo 1755, 690.1, 45; exec sleep 600")
    with pytest.raises(ZeroDivisionError), gpu_watch.GpuWatch("GPU-abc"):
        raise ZeroDivisionError
    assert has_ended(folder)


def test_nvidia_smi_that_prints_no_sample_is_an_error_before_the_steps(smi):
    folder = smi("echo No devices were found; exit 6")
    with pytest.raises(TrainingError, match="No devices were found"), gpu_watch.GpuWatch("GPU-abc"):
        pytest.fail("the steps began")
    assert has_ended(folder)


def test_an_early_end_of_nvidia_smi_is_an_error(smi):
    smi("echo 1755, 690.1, 45; echo Lost the GPU")
    with gpu_watch.GpuWatch("GPU-abc") as watched:
        watched._thread.join()
        watched._process.wait()
    assert watched.error is not None
    assert "Lost the GPU" in watched.error
    assert len(watched.list_samples(0.0)) == 1


def test_watch_without_nvidia_smi_or_a_gpu_is_refused(tmp_path, monkeypatch, megascale):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-smi"):
        gpu_watch.check_watch(uses_gpu=True)
    monkeypatch.undo()
    result = megascale("bench", "train", "tiny", "--watch", "--train.global_batch=8", "--train.device=cpu")
    assert result.returncode == 2
    assert "--watch" in result.stderr
    assert "GPU" in result.stderr


def test_the_summary_compares_the_first_and_last_samples():
    samples = [[0.5 * i, 1755.0 - 15 * (i >= 18), None if i else 690.0, 45.0 + i] for i in range(20)]
    assert gpu_watch.summarize_samples(samples) == "clock 1,755 -> 1,740 MHz, power 690 -> ? W, temperature 46 -> 64 C"
    assert "no sample" in gpu_watch.summarize_samples([])


def test_the_benchmark_prints_the_summary(tmp_path, megascale, capsys):
    arguments = ["--model.layers=1", "--model.hidden=32", "--model.vocab_size=64", "--model.sequence_length=16"]
    arguments += ["--train.micro_batch=1", "--train.global_batch=1", "--train.device=cpu", "--steps=1", "--warmup=1"]
    done = megascale("bench", "train", "tiny", *arguments, "--out", "t.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "t.json").read_text())
    assert report["watched"] is None
    assert "watched" not in done.stdout
    train_bench.print_result(report | {"watched": [[0.1, 1755.0, 690.0, 45.0]], "watch_trouble": "nvidia-smi ended"})
    shown = capsys.readouterr().out
    assert "clock 1,755 -> 1,755 MHz" in shown
    assert "nvidia-smi ended" in shown
