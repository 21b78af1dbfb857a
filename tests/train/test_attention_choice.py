"""Attention kernels: ranks that measure otherwise agree, and a run that goes on computes with what it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.api import load_config, train
from megascale.ops import attention
from megascale.ops.attention import AttentionChoice, attention_reference
from megascale.ops.attention_backends import BACKENDS
from megascale.train.attention_choice import decide_kernels
from tests.conftest import lines
from tests.exact.processes import Start, run_ranks
from tests.train.test_run import losses, weights

# Two backends of the same mask that round otherwise; what each takes is made up.
BEFORE = """
import atexit
from megascale.ops import attention, attention_backends
attention_backends.BACKENDS["explicit"] = lambda q, k, v, w: attention.attention_reference(q, k, v, window=w)
attention.measure_backends = lambda shape, device: attention.AttentionChoice("sdpa", {"sdpa": %s, "explicit": %s})
ran, adopt = set(), attention.AttentionChooser.adopt
def adopted(self, shape, name, why=""):
    ran.add(name)
    adopt(self, shape, name, why)
attention.AttentionChooser.adopt = adopted
atexit.register(lambda: print("ran:", sorted(ran)))
"""


@pytest.fixture
def backends(monkeypatch):
    """Has this process prefer the named backend, of two that round otherwise."""
    monkeypatch.setitem(BACKENDS, "explicit", lambda q, k, v, w: attention_reference(q, k, v, window=w))

    def prefer(name: str) -> None:
        times = {"sdpa": 2.0, "explicit": 2.0, name: 1.0}
        monkeypatch.setattr(attention, "measure_backends", lambda shape, device: AttentionChoice(name, dict(times)))

    return prefer


def active(run: Path) -> list[dict]:
    return [r for r in lines(run / "events.jsonl") if r["event"] == "active"]


def list_kept(run: Path) -> set[str]:
    record = json.loads((run / "kernels.json").read_text())["attention"]
    return {name for names in record.values() for name in names.values()}


def test_ranks_that_measure_otherwise_run_the_same_kernel(tiny, tmp_path):
    # Alone rank 0 would take sdpa and rank 1 explicit; with explicit the slower of the two takes 5 ms, not 6.
    starts = [Start(0, 2, before=BEFORE % (1.0, 5.0)), Start(1, 2, before=BEFORE % (6.0, 3.0))]
    arguments = ["--parallel.data=2", "--train.steps=2", "--model.window=8", "--model.layer_pattern=SL"]
    for match in run_ranks(tiny, arguments, starts):
        assert match.code == 0, match.said
        assert "ran: ['explicit']" in match.said
    run = tmp_path / "runs" / "tiny"
    assert list_kept(run) == {"explicit"}
    (report,) = active(run)
    shapes = [text for subject, text in report.items() if subject.startswith("attention ")]
    assert len(shapes) == 2
    assert all("agreed by 2 ranks" in text and "explicit 5.000 ms" in text for text in shapes)


def test_a_run_goes_on_bit_for_bit_whatever_is_measured_then(tiny, tmp_path, backends):
    for name, stops in (("calm", [8]), ("resumed", [4, 4]), ("moved", [4, 4])):
        run = tmp_path / "runs" / name
        for number, stop in enumerate(stops):
            backends("explicit" if not number else "sdpa")
            if number and name == "moved":
                (run / "kernels.json").unlink()  # the checkpoint knows it as well
            train(load_config(tiny, [f"--train.name={name}", "--train.steps=8", f"--train.stop_after={stop}"]))
        assert list_kept(run) == {"explicit"}
    expected = weights(tmp_path / "runs" / "calm")
    for name in ("resumed", "moved"):
        assert losses(tmp_path / "runs" / name) == losses(tmp_path / "runs" / "calm")
        for tensor, value in weights(tmp_path / "runs" / name).items():
            assert torch.equal(value, expected[tensor]), tensor
    backends("sdpa")
    train(load_config(tiny, ["--train.name=other", "--train.steps=8"]))
    assert losses(tmp_path / "runs" / "other") != losses(tmp_path / "runs" / "calm"), "the two must differ"


def test_a_kernel_that_cannot_be_had_any_more_is_said(tiny, tmp_path, backends, monkeypatch, capsys):
    run = tmp_path / "runs" / "tiny"
    backends("explicit")
    train(load_config(tiny, ["--train.stop_after=2"]))

    def broken(*args: object) -> None:
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setitem(BACKENDS, "explicit", broken)
    backends("sdpa")
    train(load_config(tiny, ["--train.stop_after=2"]))
    for text in (json.dumps(active(run)[-1]), capsys.readouterr().out):
        assert "replaces explicit" in text
        assert "rank 0: no kernel image" in text
    assert list_kept(run) == {"sdpa"}


names = st.sampled_from(["a", "b", "c"])
offers = st.lists(
    st.tuples(
        st.sampled_from(["x", "y"]),
        st.tuples(st.dictionaries(names, st.floats(0.1, 9.0)), st.dictionaries(names, st.just("it cannot"))),
    ),
    min_size=1,
    max_size=6,
)


@given(offers)
def test_what_is_decided_runs_on_every_rank_of_its_kind_and_no_other_is_faster(choice):
    decisions = decide_kernels([(kind, {"s": measured}) for kind, measured in choice], {}, {})
    for kind in {kind for kind, _ in choice}:
        times = [ms for each, (ms, _) in choice if each == kind]
        name, _ = decisions[kind]["s"]
        common = set(times[0]).intersection(*times)
        assert name in common if common else name == "sdpa"
        if common:
            assert max(t[name] for t in times) == min(max(t[n] for t in times) for n in common)


def test_a_kernel_that_is_named_and_cannot_run_here_is_said_before_the_first_step(tiny, tmp_path, megascale):
    result = megascale("train", tiny, "--kernels.attention=cudnn", "--train.steps=1", "--train.device=cpu")
    assert result.returncode == 2
    assert "cannot be computed by 'cudnn' on cpu: kernels.attention='cudnn': torch has no such kernel" in result.stderr
    assert result.stderr.count("--kernels.attention=auto") == 1
    assert "Traceback" not in result.stderr


def test_a_named_kernel_without_a_window_is_said_before_the_first_step(tiny, megascale):
    arguments = ["--kernels.attention=flash", "--model.window=8", "--train.steps=1", "--train.device=cpu"]
    result = megascale("train", tiny, *arguments)
    assert result.returncode == 2
    assert "cannot be computed by 'flash' on cpu" in result.stderr
    assert result.stderr.count("--kernels.attention=auto") == 1
