"""The learning-rate schedules: warm-up, end, monotony, and the published formulas."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import LrConfig, load
from megascale.config.parts import LR_SCHEDULES
from megascale.errors import ConfigError
from megascale.optim.learning_rate import SCHEDULES, compute_learning_rate, explain_warmup, register

SHAPES = ("linear", "cosine", "sqrt", "exponential")
ENDING_AT_MIN = ("cosine", "linear", "wsd")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[LrConfig, int]:
    """A configuration and the steps of its run."""
    steps = draw(st.integers(1, 400))
    values = {
        "peak": draw(st.floats(1e-6, 10.0)),
        "warmup_steps": draw(st.integers(0, steps)),
        "schedule": draw(st.sampled_from(sorted(LR_SCHEDULES.builtin_names))),
        "decay_steps": draw(st.none() | st.integers(1, 2 * steps)),
    }
    values["min"] = draw(st.floats(0.0, values["peak"]))
    if values["schedule"] == "wsd":
        values["decay_fraction"] = draw(st.floats(0.01, 1.0))
        values["decay_shape"] = draw(st.sampled_from(SHAPES))
    return LrConfig(**values), steps


@given(schedules())
def test_the_rate_rises_to_the_peak_and_never_rises_again(case: tuple[LrConfig, int]) -> None:
    lr, steps = case
    rates = [compute_learning_rate(lr, step, steps) for step in range(1, 2 * steps + 2)]
    warmup = lr.warmup_steps
    assert rates[:warmup] == [lr.peak * step / warmup for step in range(1, warmup + 1)]
    if warmup:
        assert rates[warmup - 1] == pytest.approx(lr.peak, rel=1e-15)
    tolerance = 1e-12 * lr.peak
    for earlier, later in zip(rates[max(0, warmup - 1) :], rates[max(1, warmup) :], strict=False):
        assert later <= earlier + tolerance
    for rate in rates[warmup:]:
        assert lr.min - tolerance <= rate <= lr.peak


@given(schedules())
def test_the_decay_ends_at_the_minimum_and_stays_there(case: tuple[LrConfig, int]) -> None:
    lr, steps = case
    end = max(lr.decay_steps or steps, lr.warmup_steps + 1)
    for step in (end, end + 1, 3 * end):
        rate = compute_learning_rate(lr, step, steps)
        if lr.schedule in ENDING_AT_MIN:
            assert rate == pytest.approx(lr.min, rel=1e-9, abs=1e-12 * lr.peak)
        elif lr.schedule == "constant":
            assert rate == lr.peak


@given(schedules(), st.integers(1, 400))
def test_the_decay_depends_on_its_own_end_and_not_on_the_length_of_the_run(
    case: tuple[LrConfig, int], step: int
) -> None:
    """So a run that goes on for longer, or resumes, has the same rates."""
    lr, steps = case
    pinned = lr.model_copy(update={"decay_steps": lr.decay_steps or steps})
    assert compute_learning_rate(lr, step, steps) == compute_learning_rate(pinned, step, 7 * steps)


def test_cosine_and_linear_have_the_published_values() -> None:
    cosine = LrConfig(peak=1.0, min=0.1, warmup_steps=10)
    rates = [round(compute_learning_rate(cosine, step, 110), 6) for step in (1, 10, 60, 110, 200)]
    assert rates == [0.1, 1.0, 0.55, 0.1, 0.1]
    linear = LrConfig(peak=1.0, schedule="linear", decay_steps=50)
    assert compute_learning_rate(linear, 25, 110) == pytest.approx(0.5)
    assert compute_learning_rate(LrConfig(peak=1.0, schedule="constant"), 99, 100) == 1.0


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 + 0.5 * math.cos(math.pi / 4)),
        ("sqrt", 1 - math.sqrt(0.25)),
        ("exponential", 2 * 0.5**0.25 - 1),
    ],
)
def test_wsd_is_stable_until_its_last_part(shape: str, factor: float) -> None:
    lr = LrConfig(peak=2.0, min=1.0, warmup_steps=5, schedule="wsd", decay_fraction=0.4, decay_shape=shape)
    assert [compute_learning_rate(lr, step, 100) for step in (5, 6, 59, 60)] == [2.0] * 4
    assert compute_learning_rate(lr, 61, 100) < 2.0
    assert compute_learning_rate(lr, 70, 100) == pytest.approx(1.0 + factor)  # a quarter of the decay's 40 steps
    assert compute_learning_rate(lr, 100, 100) == pytest.approx(1.0)


def test_wsd_decays_after_the_warmup_if_the_fraction_reaches_into_it() -> None:
    lr = LrConfig(peak=1.0, warmup_steps=50, schedule="wsd", decay_fraction=1.0)
    assert compute_learning_rate(lr, 75, 100) == pytest.approx(0.5)


def test_the_inverse_square_root_continues_the_warmup() -> None:
    lr = LrConfig(peak=1.0, min=0.2, warmup_steps=100, schedule="inverse_sqrt")
    rates = [compute_learning_rate(lr, step, 1000) for step in (100, 400, 2500, 10_000)]
    assert rates == pytest.approx([1.0, 0.5, 0.2, 0.2])
    assert compute_learning_rate(LrConfig(peak=1.0, schedule="inverse_sqrt"), 4, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--lr.schedule=wds"], r"lr.schedule.*did you mean 'wsd'"),
        (
            ["--lr.decay_fraction=0.5"],
            r"lr.decay_fraction=0.5 has no effect with lr.schedule=cosine; set --lr.schedule=wsd",
        ),
        (
            ["--lr.schedule=linear", "--lr.decay_shape=sqrt"],
            r"lr.decay_shape=sqrt has no effect with lr.schedule=linear",
        ),
        (["--lr.schedule=wsd", "--lr.decay_fraction=0"], r"lr.decay_fraction"),
    ],
)
def test_a_setting_without_effect_and_an_unknown_schedule_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=settings)


@pytest.mark.parametrize(
    ("lr", "steps", "note"),
    [
        (
            LrConfig(peak=1.0, warmup_steps=100),
            4,
            r"lr.warmup_steps=100 is not below train.steps=4: .* it is 0.04 \(lr.peak=1\)",
        ),
        (LrConfig(peak=1.0, warmup_steps=9, decay_steps=9), 40, r"lr.decay_steps=9 is not above lr.warmup_steps=9: "),
        (LrConfig(peak=1.0, warmup_steps=3, decay_steps=4), 4, "^$"),
        (LrConfig(peak=1.0), 0, "^$"),
    ],
)
def test_a_warmup_that_leaves_no_step_gets_a_note(lr: LrConfig, steps: int, note: str) -> None:
    assert re.search(note, explain_warmup(lr, steps))


def test_a_written_configuration_can_be_read_again(tmp_path) -> None:
    for schedule in LR_SCHEDULES.builtin_names:
        config = load(overrides=[f"--lr.schedule={schedule}"])
        config.write(tmp_path / "config.toml")
        assert load(tmp_path / "config.toml").lr == config.lr


def test_every_schedule_has_facts_and_a_registered_one_is_used() -> None:
    assert SCHEDULES.names()[:5] == LR_SCHEDULES.names()[:5]
    register("halving", lambda lr, step, end: lr.peak * 0.5**step, "halves with every step")
    try:
        config = load(overrides=["--lr.schedule=halving", "--lr.peak=8"])
        assert [compute_learning_rate(config.lr, step, 10) for step in (1, 3)] == [4.0, 1.0]
    finally:
        SCHEDULES.remove("halving")
        LR_SCHEDULES.remove("halving")
