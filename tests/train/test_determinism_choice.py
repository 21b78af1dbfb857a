"""kernels.deterministic=auto: on where a fixed order costs at most 1%, the same on all ranks, and kept with the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.api import load_config
from megascale.config.parts import ACTIVATIONS
from megascale.errors import ConfigError
from megascale.ops.dispatch import prepare_determinism
from megascale.train.determinism_choice import MAX_EXTRA_TIME, compare_times, find_candidates, find_obstacle
from tests.conftest import lines
from tests.exact.processes import Start, run_ranks

# Two kernels whose times depend on the order of their sums. Ranks measure as if they had GPUs.
BEFORE = """
from megascale.ops import attention, attention_backends, dispatch
from megascale.train import determinism_choice
attention_backends.BACKENDS["explicit"] = lambda q, k, v, w: attention.attention_reference(q, k, v, window=w)
determinism_choice.can_measure = lambda device: True
determinism_choice.find_obstacle = lambda config, dtype: ""
def measure(shape, device, candidates=None):
    times = {fixed} if dispatch.is_deterministic() else {varying}
    times = {{name: ms for name, ms in times.items() if candidates is None or name in candidates}}
    return attention.AttentionChoice(min(times, key=times.get, default="sdpa"), times)
attention.measure_backends = measure
"""


def make_before(varying: dict[str, float], fixed: dict[str, float]) -> str:
    return BEFORE.format(varying=varying, fixed=fixed)


def train(file: Path, before: list[str], *options: str) -> dict[str, Any]:
    """Train on two ranks, and return what the last start reported as active."""
    starts = [Start(rank, 2, before=text) for rank, text in enumerate(before)]
    for end in run_ranks(file, ["--parallel.data=2", *options], starts):
        assert end.code == 0, end.said
    return [r for r in lines(file.parent / "runs" / "tiny" / "events.jsonl") if r["event"] == "active"][-1]


def find_kernels(active: dict[str, Any]) -> list[str]:
    return [text.split()[0] for subject, text in active.items() if subject.startswith("attention ")]


def test_an_ordered_kernel_within_one_percent_turns_determinism_and_replays_on(tiny):
    """Rank 1 alone would take sdpa. The slower rank's time counts for both."""
    before = [
        make_before({"sdpa": 1.0, "explicit": 0.9}, {"sdpa": 9.0, "explicit": 1.005}),
        make_before({"sdpa": 0.995, "explicit": 1.0}, {"sdpa": 9.0, "explicit": 1.005}),
    ]
    active = train(tiny, before, "--train.steps=1")
    assert active["deterministic"].startswith("a repeated step gives the same bits (kernels.deterministic=auto: ")
    assert "attention takes 0.5% longer by explicit with a fixed order" in active["deterministic"]
    assert find_kernels(active) == ["explicit"]
    assert "resilience.replay_interval=auto" in active["replay"]


def test_determinism_is_off_with_the_reason_where_it_costs_more_and_stays_off(tiny):
    slow = make_before({"sdpa": 1.0, "explicit": 1.5}, {"sdpa": 1.12, "explicit": 1.5})
    active = train(tiny, [slow, slow], "--train.stop_after=1")
    assert active["deterministic"].startswith("off (kernels.deterministic=auto: attention ")
    assert "would take 12.0% longer by sdpa with a fixed order than by sdpa" in active["deterministic"]
    assert find_kernels(active) == ["sdpa"]
    assert active["replay"] == "off (resilience.replay_interval=auto: kernels.deterministic=auto is off)"
    fast = make_before({"sdpa": 1.0}, {"sdpa": 1.0})
    active = train(tiny, [fast, fast], "--train.stop_after=1")
    assert active["deterministic"] == "off (kernels.deterministic=auto: kept with the run)"


@pytest.mark.parametrize("lost_file", [False, True])
def test_a_run_keeps_determinism_that_it_started_with(lost_file, tiny):
    fast = make_before({"sdpa": 1.0}, {"sdpa": 1.0})
    train(tiny, [fast, fast], "--train.stop_after=1")
    record = tiny.parent / "runs" / "tiny" / "kernels.json"
    assert json.loads(record.read_text())["attention"]["all devices"] == {"order of sums": "fixed"}
    if lost_file:
        record.unlink()  # the checkpoint has the choice too
    slow = make_before({"sdpa": 1.0}, {"sdpa": 2.0})
    active = train(tiny, [slow, slow], "--train.stop_after=1")
    assert (
        active["deterministic"] == "a repeated step gives the same bits (kernels.deterministic=auto: kept with the run)"
    )


def test_a_given_value_needs_no_measurement_and_is_reported_if_it_is_true(tiny):
    fails = make_before({}, {}).replace("def measure(shape", "def unused(shape").replace("= measure", "= None")
    options = ["--train.steps=1", "--kernels.attention=sdpa", "--resilience.replay_interval=0"]
    active = train(tiny, [fails, fails], "--kernels.deterministic=true", *options)
    assert active["deterministic"] == "a repeated step gives the same bits"
    active = train(tiny, [fails, fails], "--kernels.deterministic=false", "--checkpoint.resume=false", *options)
    assert "deterministic" not in active


def test_a_cpu_keeps_its_operators_without_a_line(tiny):
    active = train(tiny, ["", ""], "--train.steps=1")
    assert "deterministic" not in active
    assert "replay" not in active


times = st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 9.0), min_size=1)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=4))
def test_determinism_is_on_exactly_if_a_fast_kernel_with_a_fixed_order_is_on_all_ranks(ranks):
    varying = [("gpu", {"s": (times, {})}) for times, _ in ranks]
    candidates = find_candidates(varying)["gpu"]["s"]
    fixed = []
    for _, times_of_rank in ranks:
        fixed.append(("gpu", {"s": ({n: t for n, t in times_of_rank.items() if n in candidates} or {"sdpa": 0.0}, {})}))
    is_on, reason = compare_times(varying, fixed)
    common = set.intersection(*(set(times) for times, _ in ranks))
    fastest = min((max(times[name] for times, _ in ranks) for name in common), default=None)
    expected = False
    for name in common:
        if fastest is not None and all(name in ordered for _, ordered in ranks):
            slowest = max(times[name] for times, _ in ranks)
            ordered_time = max(ordered[name] for _, ordered in ranks)
            limit = fastest * (1 + MAX_EXTRA_TIME)
            expected |= slowest <= limit and ordered_time / fastest - 1 <= MAX_EXTRA_TIME
    assert is_on == expected
    assert reason


def test_all_shapes_and_kinds_must_be_cheap():
    def measure(kind: str, first: float, second: float) -> Any:
        return (kind, {"first": ({"a": first}, {}), "second": ({"a": second}, {})})

    varying = [measure("x", 1.0, 1.0), measure("y", 2.0, 2.0)]
    assert compare_times(varying, [measure("x", 1.0, 1.0), measure("y", 2.0, 2.0)])[0]
    is_on, reason = compare_times(varying, [measure("x", 1.0, 1.0), measure("y", 2.0, 2.2)])
    assert not is_on
    assert reason == "attention second on y would take 10.0% longer by a with a fixed order than by a"
    # Torch's cuDNN attention refuses to be deterministic.
    is_on, reason = compare_times(varying, [measure("x", 1.0, 0.0), measure("y", 2.0, 2.0)])
    assert not is_on
    assert reason == "a, the fastest attention kernel for second on x, has no fixed order"
    assert not compare_times([("x", {})], [("x", {})])[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], ""),
        (["--kernels.mode=reference"], "kernels.mode=reference"),
        (["--kernels.attention=cudnn"], "kernels.attention=cudnn sums in a varying order"),
    ],
)
def test_obstacles_of_the_settings(options, reason, tiny, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    obstacle = find_obstacle(load_config(tiny, options), torch.bfloat16)
    assert bool(obstacle) == bool(reason)
    assert reason in obstacle


def test_obstacles_of_types_parts_and_the_environment(tiny, monkeypatch):
    config = load_config(tiny, [])
    assert find_obstacle(config, torch.float32) == "attention kernels are not measured in float32"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert "set to ':0:0'" in find_obstacle(config, torch.bfloat16)
    ACTIVATIONS.register("noisy", ACTIVATIONS["gelu"])
    try:
        obstacle = find_obstacle(load_config(tiny, ["--model.activation=noisy"]), torch.bfloat16)
        assert "model.activation=noisy is registered by a package" in obstacle
    finally:
        ACTIVATIONS.remove("noisy")


def test_a_cublas_workspace_that_excludes_determinism_is_refused(monkeypatch):
    """A run that has decided for a fixed order may resume with another environment."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG"):
        prepare_determinism()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    prepare_determinism()
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
