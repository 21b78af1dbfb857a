"""Plans and predictions that leave out the batch or the layout: what is chosen, pasted, written and refused."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.common import DEFAULT_CLUSTER, DEFAULT_DEVICE, make_scenario
from megascale.cli.main import app
from megascale.cli.plan import double_gpus
from megascale.config import Config, from_tree, load
from megascale.core.parameter_counts import count_stage_parameters
from megascale.errors import ConfigError, FitError
from megascale.simulate import search
from megascale.simulate.cluster import load_cluster, set_value
from megascale.simulate.defaults import RECOMPUTE_KINDS, can_choose_layout, choose_layout, format_flags, rank_layouts
from megascale.simulate.planner.layout_cost import make_plan
from megascale.simulate.render import split_constant_columns
from megascale.simulate.scenario import dump_settings
from megascale.simulate.search import set_zero


@functools.cache
def invoke(line: str, code: int = 0, width: int = 100) -> str:
    """Run a command line in this process, once, and return its output. The exit code must be `code`."""
    result = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": str(width)})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def find_flags(output: str) -> str:
    """Return the flags that a command prints to paste."""
    return re.search(r"^(?:chosen, since not set|the first, to paste): (.*)$", output, re.MULTILINE)[1]


def test_the_default_machine_has_h100s():
    assert DEFAULT_DEVICE == "H100"
    assert "H100" in load_cluster(DEFAULT_CLUSTER).gpu.name


@pytest.mark.parametrize("preset", ["tiny", "llama-8b", "qwen3-30b-a3b"])
def test_a_preset_alone_is_planned_and_its_flags_repeat_the_plan(preset):
    line = f"plan --gpus 8 --model.preset={preset}"
    output = invoke(line)
    assert "fits: the fullest rank" in output
    flags = find_flags(output)
    assert "--train.global_batch=" in flags
    assert ("--model.vocab_size=50304" in flags) == (preset == "tiny")
    repeated = invoke(f"{line} {flags}")
    assert re.search(r"needs [\d.]+ GiB", repeated)[0] == re.search(r"needs [\d.]+ GiB", output)[0]
    assert "chosen" not in repeated


def test_layouts_are_compared_by_sharding_and_keep_as_many_layers_as_fit():
    """GPT 13B on four H100s fits with ZeRO-2, and with ZeRO-3 and kept layers."""
    settings = ["model.preset=gpt-13b", "train.precision=bfloat16"]
    scenario = make_scenario(load(None, settings), 4, DEFAULT_CLUSTER)
    scenario = replace(scenario, cluster=set_value(scenario.cluster, "gpu", "memory_gib", 79.2))
    estimates = rank_layouts(scenario)
    assert [estimate.seconds for estimate in estimates] == sorted(estimate.seconds for estimate in estimates)
    by_zero = {estimate.scenario.config.parallel.zero: estimate for estimate in estimates}
    config = by_zero[3].scenario.config
    kept_layers = config.parallel.zero3_keep_layers
    assert kept_layers > 0
    assert f"--parallel.zero3_keep_layers={kept_layers}" in format_flags(config)
    assert make_plan(config, 4, 79.2).fits
    assert make_plan(config, 4, 79.2).count_keepable_layers() == kept_layers
    output = invoke("plan --gpus 4 --model.preset=gpt-13b")
    assert re.search(rf"^ *1 +2 +3 +{kept_layers} +\d", output, re.MULTILINE)
    assert "kept: layers that stay gathered" in output


def test_a_search_keeps_as_many_layers_as_a_plan_and_a_given_number(tmp_path):
    line = (
        "simulate search --gpus 4 --model.preset=gpt-13b --zero=3 --parallel.tensor=1 --parallel.pipeline=1 "
        "--parallel.recompute=selective --train.micro_batch=1 --train.global_batch=32 --json"
    )
    [layout, *_] = json.loads(invoke(line))["layouts"]
    toml = tmp_path / "job.toml"
    invoke(f"{line} --toml {toml}")
    config = load(toml, [])
    unkept = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero3_keep_layers": 0})})
    kept_layers = make_plan(unkept, 4, load_cluster(DEFAULT_CLUSTER).gpu.memory_gib).count_keepable_layers()
    assert layout["zero3_keep_layers"] == config.parallel.zero3_keep_layers == kept_layers > 0
    given = json.loads(invoke(f"{line} --parallel.zero=3 --parallel.zero3_keep_layers=3"))["layouts"]
    assert {layout["zero3_keep_layers"] for layout in given} == {3}


def test_layouts_of_a_model_that_fits_nowhere_are_refused_without_a_schedule():
    """llama3.1-70b on 16 H100: without saved activations in the bound, 2,455 layouts of ZeRO-1 had to be planned."""
    arguments = ["model.preset=llama3.1-70b", "train.global_batch=256", "train.precision=bfloat16"]
    config = set_zero(load(None, arguments), 1)
    scenario = make_scenario(config, 16, DEFAULT_CLUSTER)
    software = scenario.software
    layouts = search.search_layouts(config, scenario.cluster, scenario.calibration, software, 16, 16, RECOMPUTE_KINDS)
    assert len(layouts) > 1000
    assert search._may_fit(layouts, np.arange(len(layouts)), config, 79.2).sum() < 50
    assert not can_choose_layout(scenario)
    assert can_choose_layout(replace(scenario, gpus=32))


def test_experts_are_divided_over_data_parallel_ranks_first():
    output = invoke("plan --gpus 8 --device H200 --model.preset=qwen3-30b-a3b")
    assert "--parallel.expert=4 --parallel.experts_over=data" in find_flags(output)
    assert "--parallel.tensor" not in find_flags(output)


def test_a_plan_without_a_pipeline_has_no_bubble():
    output = invoke("plan --gpus 8 --model.preset=llama-8b")
    assert "bubble" not in output
    assert "each rank" in output


def test_a_layout_is_kept_and_gets_a_batch_that_divides():
    output = invoke("plan --gpus 48 --model.preset=gpt-13b --parallel.tensor=2 --parallel.pipeline=4")
    assert "tensor 2" in output
    assert "pipeline 4" in output
    batch = int(re.search(r"--train.global_batch=(\d+)", find_flags(output))[1])
    assert batch % (6 * 4) == 0


def test_too_few_gpus_name_a_number_that_does():
    result = CliRunner().invoke(app, ["plan", "--gpus", "1", "--model.preset=llama-8b"])
    assert result.exception.exit_code == 3
    gpus = re.search(r"--gpus (\d+) has a layout that fits", str(result.exception))[1]
    assert int(gpus) == 2  # fewer than a host
    offload = re.search(r"(--optimizer\.offload=true .*) fits, with the", str(result.exception))[1]
    assert "fits: the fullest rank" in invoke(f"plan --gpus 1 --model.preset=llama-8b {offload}")
    assert "fits: the fullest rank" in invoke(f"plan --gpus {gpus} --model.preset=llama-8b")


@pytest.mark.parametrize(("gpus", "expected"), [(1, 2), (4, 8), (3, 6), (6, 8), (8, 16), (12, 16), (16, 32)])
def test_more_gpus_than_a_host_has_are_those_of_whole_hosts(gpus, expected):
    assert double_gpus(gpus, 8) == expected


def test_an_assumed_vocabulary_is_printed_although_the_layout_is_given():
    layout = "--gpus 8 --model.preset=tiny --train.micro_batch=8 --train.global_batch=64"
    for command in ("plan", "simulate step"):
        assert "--model.vocab_size=50304" in find_flags(invoke(f"{command} {layout}"))


def test_a_sweep_begins_with_a_layout_that_fits():
    output = invoke("simulate sweep --gpus 8 --model.preset=llama3.1-8b --vary parallel.recompute=none,full")
    assert len(re.findall(r"^(?:none|full) +\d", output, re.MULTILINE)) == 2
    assert "skipped" not in output
    result = CliRunner().invoke(app, shlex.split("simulate sweep --model.preset=llama3.1-405b --vary gpus=8,16"))
    assert isinstance(result.exception, FitError)
    assert "no layout on 16 GPUs fits" in str(result.exception)
    assert "software:" not in result.output  # no table without rows


def test_a_file_is_planned_as_it_is():
    output = invoke("plan examples/gpt-175b.toml --gpus 12288")
    assert "chosen" not in output


def test_plan_and_step_choose_one_layout():
    planned = find_flags(invoke("plan --gpus 8 --model.preset=llama-8b"))
    assert find_flags(invoke("simulate step --gpus 8 --model.preset=llama-8b")) == planned
    searched = invoke("simulate search --gpus 8 --model.preset=llama-8b")
    assert find_flags(searched) == planned


def test_search_varies_sharding_and_prints_its_assumptions(tmp_path):
    file = tmp_path / "job.toml"
    output = invoke(f"simulate search --gpus 8 --model.preset=llama-8b --toml {file}")
    assert "--zero=1,2,3" in output
    assert "calibration" in output
    assert "MFU: full attention" in output
    listed = json.loads(invoke("simulate search --gpus 8 --model.preset=llama-8b --json"))["layouts"]
    assert len({layout["zero"] for layout in listed}) > 1
    config = load(file)
    assert make_plan(config, 8, 80.0).fits
    assert f"--train.global_batch={config.train.global_batch}" in find_flags(output)


def test_flags_of_a_search_keep_the_precision_and_chunks_are_explained():
    line = "simulate search --gpus 8 --model.preset=gpt-1.3b --train.global_batch=64 --zero=1 --recompute=none"
    assert "--train.linear_precision=float8 " in find_flags(invoke(f"{line} --precisions float8"))
    output = invoke(line)
    assert "--train.linear_precision" not in find_flags(output)
    assert bool(re.search(r"\dx\d", output)) == ("PP: stages x chunks per stage" in output)
    assert "PP: stages x chunks per stage" in output


def test_search_keeps_a_sharding_that_is_set():
    output = invoke("simulate search --gpus 8 --model.preset=llama-8b --parallel.zero=1")
    assert "--zero=1," in output.replace(" ", ",")
    assert "ZeRO 1" in output


SEARCH = ["simulate", "search"]
REST = ["--gpus", "8", "--json"]


@pytest.mark.parametrize(
    "settings",
    [
        ["--parallel.tensor=2", "--parallel.virtual-stages=2", "--train.micro-batch=2", "--model.preset=llama-8b"],
        [
            "--model.preset=llama-8b",
            "--parallel.virtual_stages",
            "2",
            "--train.micro_batch",
            "2",
            "--parallel.tensor=2",
        ],
    ],
)
def test_search_keeps_every_setting_of_the_layout_in_any_order_and_spelling(settings):
    result = CliRunner().invoke(app, SEARCH + settings + REST, catch_exceptions=False)
    layouts = json.loads(result.stdout)["layouts"]
    assert {(layout["tensor"], layout["micro_batch"]) for layout in layouts} == {(2, 2)}
    assert {layout["virtual"] for layout in layouts if layout["pipeline"] > 1} <= {2}


def test_search_varies_a_size_whose_setting_is_unset():
    arguments = SEARCH + ["--train.micro_batch=unset", "--model.preset=llama-8b"] + REST
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    layouts = json.loads(result.stdout)["layouts"]
    assert len({layout["micro_batch"] for layout in layouts}) > 1


def test_search_keeps_a_recompute_mode_that_is_the_first_argument():
    arguments = SEARCH + ["--parallel.recompute=full", "--model.preset=llama-8b"] + REST
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert {layout["recompute"] for layout in json.loads(result.stdout)["layouts"]} == {"full"}


def test_search_refuses_an_unknown_sharding():
    result = CliRunner().invoke(app, ["simulate", "search", "--gpus", "8", "--model.preset=llama-8b", "--zero=4"])
    assert "choose among 0, 1, 2, 3" in str(result.exception)


def test_copies_of_the_state_are_planned_and_not_simulated():
    layout = "--gpus 32 --model.preset=llama-8b --parallel.replicate=4 --parallel.zero=3"
    assert "replicate" in invoke(f"plan {layout}")
    config = load(None, ["model.preset=llama-8b", "parallel.replicate=4", "parallel.zero=3", "train.micro_batch=1",
                         "train.global_batch=32", "train.precision=bfloat16"])  # fmt: skip
    sent = make_plan(config, 32, 80.0).traffic(0).replicate
    shard = count_stage_parameters(config.model, config.parallel, 0) / 8
    assert sent == pytest.approx(2 * 3 / 4 * 4 * shard)  # an all-reduce of float32 over four ranks
    result = CliRunner().invoke(app, ["simulate", "step"] + layout.split())
    assert "parallel.replicate=4 has no price" in str(result.exception)
    assert "--parallel.replicate=1" in str(result.exception)


def test_equal_columns_leave_the_table():
    rows = [{"TP": "1", "PP": "2", "MFU": "50%"}, {"TP": "1", "PP": "4", "MFU": "50%"}]
    assert split_constant_columns(rows, keep=["MFU"]) == (["PP", "MFU"], {"TP": "1"})


def test_tables_fit_80_columns_and_have_no_row_of_zeros():
    plan = invoke("plan --gpus 8 --model.preset=llama3.1-8b --parallel.tensor=2 --parallel.pipeline=2", width=80)
    rows = [line.split() for line in plan.splitlines() if re.search(r"\d\.\d\d +\d+\.\d\d *$", line)]
    assert len(rows) >= 10
    assert not [row for row in rows if row[-2:] == ["0.00", "0.00"]]
    step = invoke("simulate step --gpus 8 --model.preset=llama3.1-8b", width=80)
    assert re.search(r"^ +megatron-core-h200 +megascale-h200 *$", step, re.MULTILINE)
    sweep = invoke("simulate sweep examples/gpt-175b.toml --vary gpus=768:1536", width=80)
    assert re.search(r"^gpus +step, s +P10-P90 +MFU +tokens/s +GiB *$", sweep, re.MULTILINE)


def set_layout(config: Config, **sizes: Any) -> Config:
    """Return the configuration with a layout of one rank per axis, except for the given sizes."""
    layout = {"tensor": 1, "context": 1, "pipeline": 1, "virtual": 1, "micro_batch_group_size": 0}
    layout |= {"data": 1, "micro": 1, "recompute": "full"}
    return search.LayoutSettings(config).set_layout(**layout | sizes)


def set_validated_layout(config: Config, **sizes: Any) -> Config:
    """Return the same by validating all sections."""
    tree = dump_settings(config)
    keys = {"virtual": "virtual_stages"}
    for key in ("layer_split", "micro_batch_group_size"):
        tree["parallel"].pop(key, None)
    train = {"micro_batch": sizes.pop("micro")}
    if not sizes["micro_batch_group_size"]:
        del sizes["micro_batch_group_size"]
    if sizes["context"] == 1:
        for key in ("context", "context_parts"):
            tree["overlap"].pop(key, None)
    tree["parallel"] |= {keys.get(name, name): value for name, value in sizes.items()}
    tree["train"] |= train
    return from_tree(tree)


def describe(make: Callable[..., Config], config: Config, sizes: dict[str, Any]) -> Any:
    """Return a configuration's values and the keys that are set, or its error."""
    try:
        result = make(config, **sizes)
    except ConfigError as error:
        return str(error)
    return result, {name: getattr(result, name).model_fields_set for name in result.model_fields_set}


@given(
    settings=st.lists(
        st.sampled_from(
            [
                "parallel.zero=2",
                "parallel.zero=3",
                "parallel.gather_precision=float8",
                "train.linear_precision=float8",
                "parallel.reduce_dtype=bfloat16",
                "overlap.reductions=copies",
                "parallel.offload_activations=true",
                "train.precision=bfloat16",
                "optimizer.name=muon",
                "model.layer_kinds.local.window=64",
            ]
        ),
        max_size=3,
        unique=True,
    ),
    sizes=st.fixed_dictionaries(
        {
            "tensor": st.sampled_from([1, 2, 3]),
            "context": st.sampled_from([1, 2]),
            "pipeline": st.sampled_from([1, 2, 4]),
            "virtual": st.sampled_from([1, 2]),
            "micro_batch_group_size": st.sampled_from([0, 4]),
            "data": st.sampled_from([1, 8]),
            "micro": st.sampled_from([1, 2]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
        }
    ),
)
def test_a_layout_without_repeated_validation_is_the_same(settings, sizes):
    """Values, set keys and errors equal those of a configuration whose sections are all validated."""
    try:
        config = load(None, ["model.preset=gpt-1.3b", *settings])
    except ConfigError:
        reject()
    assert describe(set_layout, config, sizes) == describe(set_validated_layout, config, dict(sizes))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize(("zero", "recompute"), [(0, "none"), (1, "norms"), (2, "selective"), (3, "full")])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_no_layout_that_fits_is_dropped_before_its_plan(precision, zero, recompute, optimizer):
    """A layout is never dropped on GPUs with the memory that its plan needs."""
    config = load(None, ["model.preset=gpt-1.3b", "model.sequence_length=2048", f"parallel.recompute={recompute}",
                         f"train.precision={precision}", f"parallel.zero={zero}", f"optimizer.name={optimizer}",
                         "train.global_batch=8"])  # fmt: skip
    scenario = make_scenario(config, 4, DEFAULT_CLUSTER)
    layouts = search.search_layouts(
        config, scenario.cluster, scenario.calibration, scenario.software, 4, 4, [recompute]
    )
    checked = 0
    is_checked = (layouts.virtual <= 2) & (layouts.micro_batch_group_size == 0) & (layouts.micro <= 2)
    for number in np.flatnonzero(is_checked):
        tensor, context, pipeline = [
            int(array[number]) for array in (layouts.tensor, layouts.context, layouts.pipeline)
        ]
        data = int(layouts.data[number])
        virtual, micro = int(layouts.virtual[number]), int(layouts.micro[number])
        sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "virtual": virtual, "data": data}
        layout = set_layout(config, micro=micro, recompute=recompute, **sizes)
        needed_gib = make_plan(layout, 4, 1.0).needed_gib  # with little memory the plan has no graphs
        assert search._may_fit(layouts, np.array([number]), config, needed_gib).all(), layout.parallel
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("setting", ["overlap.context=copies", "overlap.context_parts=true"])
def test_a_layout_without_context_ranks_has_no_exchange_between_them(setting):
    config = load(None, ["model.preset=gpt-1.3b", "parallel.context=2", setting])
    key = setting.removeprefix("overlap.").partition("=")[0]
    requested = getattr(config.overlap, key)
    for context, is_kept in ((1, False), (2, True)):
        layout = set_layout(config, context=context)
        assert (getattr(layout.overlap, key) == requested) == is_kept


def test_a_batch_alone_leaves_the_layout_to_be_chosen():
    output = invoke("plan --gpus 8 --model.preset=llama3.1-8b --train.global_batch=128")
    assert "fits: the fullest rank" in output
    assert "--train.global_batch=128" in find_flags(output)
    output = invoke("plan --gpus 8 --model.preset=llama3.1-8b --parallel.zero=2 --train.global_batch=128")
    assert "--train.micro_batch=1 " in find_flags(output)


def test_a_model_that_fits_no_layout_is_given_no_setting_that_was_tried():
    scenario = make_scenario(load(None, ["model.preset=gpt-13b", "train.precision=bfloat16"]), 1, DEFAULT_CLUSTER)
    with pytest.raises(FitError, match=r"no layout on 1 GPU fits 79.2 GiB, with parallel\.zero=1 to 3"):
        choose_layout(scenario)
    result = CliRunner().invoke(app, ["simulate", "search", "--gpus", "1", "--model.preset=gpt-13b", "--zero=3"])
    assert "use more GPUs or, if --recompute was given" in str(result.exception)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("gpt-1.3b", ["8 GPUs, parallel.zero=1: layout 1 of at most", "8 GPUs, parallel.zero=3: listing the layouts"]),
        ("qwen3-30b-a3b", ["8 GPUs: layout 1"]),
    ],
)
def test_the_choice_of_a_layout_reports_its_progress(preset, expected):
    """The choice for a model that barely fits compares hundreds of layouts, which takes minutes."""
    scenario = make_scenario(load(None, [f"model.preset={preset}", "train.precision=bfloat16"]), 8, DEFAULT_CLUSTER)
    texts: list[str] = []
    choose_layout(scenario, texts.append)
    for text in expected:
        assert any(reported.startswith(text) for reported in texts)


def test_figures_of_a_machine_without_a_calibration_say_so():
    for command in ("step", "search"):
        output = invoke(f"simulate {command} --gpus 8 --model.preset=llama-8b")
        assert "caution h100-dgx is not calibrated for megascale" in output
    for command in ("ablate", "effective --trials 10", "sweep --vary parallel.zero=2,3"):
        output = invoke(f"simulate {command} --gpus 8 --model.preset=gpt-1.3b")
        assert "caution h100-dgx is not calibrated for megascale" in output
    assert "not calibrated" not in invoke("simulate step --gpus 8 --model.preset=llama-8b --cluster h100-host")
    assert "the order is predicted on h100-dgx" in invoke("plan --gpus 8 --model.preset=llama-8b")
    assert "the order is predicted on b200-dgx" in invoke("plan --gpus 8 --model.preset=llama-8b --device B200")
    assert "predicted" not in invoke("plan --gpus 8 --model.preset=qwen3-30b-a3b")


def test_a_search_keeps_the_layout_of_the_command_line():
    line = "simulate search --gpus 64 --model.preset=llama3.1-8b --parallel.tensor=4 --parallel.recompute=none --json"
    layouts = json.loads(invoke(f"{line} --parallel.context=4"))["layouts"]
    assert layouts
    for layout in layouts:
        assert (layout["tensor"], layout["context"], layout["recompute"]) == (4, 4, "none")
    assert "tensor 4 as given" in invoke("simulate search --gpus 64 --model.preset=llama3.1-8b --parallel.tensor=4")


def test_a_search_refuses_a_given_layout_that_does_not_divide():
    command = "simulate search --gpus 64 --model.preset=llama3.1-8b --parallel.tensor=3 --train.global_batch=64"
    result = CliRunner().invoke(app, shlex.split(command))
    assert isinstance(result.exception, FitError)
    assert "tensor 3" in str(result.exception)
