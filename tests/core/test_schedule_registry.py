"""Schedules by name: what a configuration may ask for, and that nothing runs or is priced unproven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.config import from_tree
from megascale.core.checker import ScheduleError
from megascale.core.layout import lay_out
from megascale.core.schedule import Action, ActionKind, Schedule, build_1f1b, build_pipeline_schedule, without_overlap
from megascale.core.schedule_registry import SCHEDULES, ScheduleDefinition, build_checked_schedule
from megascale.errors import ConfigError, FitError
from megascale.simulate import step
from megascale.simulate.calibration import load_calibration
from megascale.simulate.event import simulate_step
from megascale.simulate.planner.layout_cost import LayoutCost
from megascale.simulate.scenario import Scenario
from megascale.simulate.software import MEGASCALE
from tests.simulate.simulator_cases import GPT_13B, calm, case

MODEL = {"layers": 8, "hidden": 16, "heads": 4, "sequence_length": 8, "vocab_size": 21, "vocab_multiple": 8}


def laid_out(**parallel):
    tree = {"model": MODEL, "parallel": {"pipeline": 2, **parallel}, "train": {"micro_batch": 1, "global_batch": 8}}
    return lay_out(from_tree(tree), 4)


def test_names_are_the_schedules_they_say():
    assert laid_out().schedule() == laid_out(schedule="1f1b").schedule() == build_1f1b(2, 4)
    assert laid_out(schedule="interleaved").schedule() != build_1f1b(2, 4)
    chunks = {"virtual_stages": 2, "micro_batch_group_size": 4}
    assert laid_out(**chunks).schedule() == laid_out(schedule="interleaved", **chunks).schedule()
    assert without_overlap(build_1f1b(2, 4)).exposed == build_checked_schedule("auto", 2, 1, 4, overlap=False).exposed


def test_reductions_are_armed_for_each_backward_only_where_there_is_somebody_to_reduce_with():
    def reductions(layout):
        return [a.microbatch for a in layout.schedule()[0] if a.kind == ActionKind.REDUCE_GRADS]

    assert reductions(laid_out(zero=2)) == [0, 1, 2, 3]
    assert reductions(laid_out(zero=1)) == [-1]
    alone = {"model": MODEL, "parallel": {"zero": 2}, "train": {"micro_batch": 1, "global_batch": 8}}
    assert reductions(lay_out(from_tree(alone), 1)) == [-1]


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(
        ConfigError, match=r"parallel.schedule='gpipe' is not known; choose among 'auto', '1f1b', 'interleaved'"
    ):
        laid_out(schedule="gpipe")
    with pytest.raises(FitError, match=r"schedule=1f1b .*virtual_stages=2; set --parallel.virtual_stages=1"):
        laid_out(schedule="1f1b", virtual_stages=2).schedule()
    with pytest.raises(ConfigError, match="registered already"):
        SCHEDULES.register("auto", ScheduleDefinition(build_pipeline_schedule))


def hangs(p: int, v: int, m: int, reduce_each: bool, group: int | None) -> Schedule:
    """The last stage runs all forwards first, and the first one waits for a gradient before it runs its next."""
    schedule = build_1f1b(p, m, reduce_each)
    waits = {ActionKind.FORWARD: 1, ActionKind.SEND_FORWARD: 2, ActionKind.RECV_BACKWARD: 3}

    def first(action: Action) -> tuple[int, int, int]:
        return (0, 0, 0) if action.kind == ActionKind.GATHER_PARAMS else (1, order(action), waits.get(action.kind, 4))

    def order(action: Action) -> int:
        return m - 1 if action.microbatch < 0 else action.microbatch

    forwards = (ActionKind.GATHER_PARAMS, ActionKind.RECV_FORWARD, ActionKind.FORWARD)
    lists = [sorted(schedule[0], key=first)] + [
        sorted(s, key=lambda a: a.kind not in forwards) for s in list(schedule)[1:]
    ]
    return schedule.replace_actions(lists)


BROKEN = {
    "hangs": (hangs, "deadlocks: stage 0 at backward"),
    "of another size": (
        lambda p, v, m, *options: build_pipeline_schedule(p, v, m + 1, *options),
        "made .* but .* were requested",
    ),
    "reduces once": (lambda p, v, m, each, group: build_pipeline_schedule(p, v, m, not each, group), "parallel.zero=2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_that_is_wrong_is_neither_trained_nor_planned_nor_priced(name, monkeypatch):
    maker, message = BROKEN[name]
    monkeypatch.setitem(SCHEDULES, name, ScheduleDefinition(maker))
    layout = laid_out(schedule=name)
    with pytest.raises(ScheduleError, match=message):
        layout.schedule()
    with pytest.raises(ScheduleError, match=message):
        LayoutCost(layout, 80.0).schedule  # noqa: B018
    with pytest.raises(ScheduleError, match=message):
        simulate_step(calm(), case(1, 2, 1, 1, 1, 8, model=GPT_13B), schedule=name)
    scenario = Scenario(layout.config, 4, calm(), load_calibration(None, "a100-roce"), MEGASCALE)
    with pytest.raises(ScheduleError, match=message):
        step.estimate_step(scenario, "event")


def test_the_closed_form_knows_only_what_it_has_a_formula_for(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "own", ScheduleDefinition(build_pipeline_schedule))
    scenario = Scenario(laid_out(schedule="own").config, 4, calm(), load_calibration(None, "a100-roce"), MEGASCALE)
    with pytest.raises(ConfigError, match=r"parallel.schedule=own has no closed form.*--level event"):
        step.estimate_step(scenario)
    auto = replace(scenario, config=laid_out().config)
    assert step.estimate_step(scenario, "event").seconds == step.estimate_step(auto, "event").seconds
