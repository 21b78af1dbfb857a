"""`megascale plan`: what it says, what it refuses and how, its time and memory, no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import from_tree, load
from megascale.core.copy_choice import SHARD_SWITCH
from megascale.core.layout import lay_out, nearest_divisors
from megascale.errors import FitError
from megascale.simulate.planner.layout_cost import LayoutCost, make_plan
from megascale.simulate.planner.layout_figures import GIB, RESERVE_GIB

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "gpt-175b.toml")
SLOW = str(Path(EXAMPLE).with_name("gpt-13b-slow-network.toml"))

# Runs the command line in a process of its own and reports what the process cost. (getrusage's peak would count the
# parent's memory from before exec.)
MEASURE = r"""
import contextlib, io, json, re, sys, time
begin = time.perf_counter()
from megascale.cli.main import main
sys.argv = ["megascale", *sys.argv[1:]]
out = io.StringIO()
code = 0
try:
    with contextlib.redirect_stdout(out):
        main()
except SystemExit as stop:
    code = stop.code
print(json.dumps({
    "code": code, "seconds": time.perf_counter() - begin, "out": out.getvalue(),
    "mib": int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1024,
    "torch": any(m == "torch" or m.startswith("torch.") for m in sys.modules),
}))
"""


def measured(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE] + list(arguments), capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def example(*overrides: str) -> LayoutCost:
    config = load(EXAMPLE, overrides)
    return make_plan(config, 12288, 80.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("gpus", "overrides"),
    [
        ("12288", []),
        ("100000", ["--parallel.pipeline=4", "--parallel.virtual_stages=24", "--train.global_batch=100000"]),
    ],
)
def test_plan_at_scale_in_seconds_without_torch(gpus, overrides):
    """Targets: 3 s and 500 MiB on a quiet core; the limit on time here allows a busy one."""
    result = measured("plan", EXAMPLE, "--gpus", gpus, *overrides)
    assert result["code"] in (0, None)
    assert not result["torch"]
    assert result["seconds"] < 10
    assert result["mib"] < 500
    assert "fits" in result["out"]


def test_plan_as_json():
    result = measured("plan", EXAMPLE, "--gpus", "12288", "--json")
    plan = json.loads(result["out"])
    assert plan["layout"] == {
        "tensor": 8,
        "pipeline": 8,
        "virtual_stages": 6,
        "context": 1,
        "data": 192,
        "microbatches": 32,
        "layers_by_chunk": [2] * 48,
        "zero": 1,
        "recompute": "none",
    }
    assert plan["schedule"]["bubble_ideal"] == pytest.approx(7 / (6 * 32))
    assert plan["schedule"]["in_flight_by_stage"] == [55 - 2 * s for s in range(8)]
    assert [m["total"] for m in plan["memory_by_stage"]] == [
        sum(v for k, v in m.items() if k != "total") for m in plan["memory_by_stage"]
    ]
    assert plan["needed_gib"] == pytest.approx(max(m["total"] for m in plan["memory_by_stage"]) / GIB + 4)
    assert plan["fits"] is True
    assert plan["tokens_per_step"] == 6144 * 2048


def test_tables_and_picture(megascale):
    done = megascale(
        "plan", "--gpus", 8, "--model.preset=gpt-13b", "--parallel.tensor=2", "--parallel.pipeline=2",
        "--train.precision=bfloat16", "--train.micro_batch=1", "--train.global_batch", 8, "--plot", "plan.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for arguments in ("first stage", "last stage", "total", "fits", "ZeRO-1", "data: reduce", "GFLOP per token"):
        assert arguments in done.stdout
    # 1F1B of 2 stages and 4 micro-batches at 2 columns a forward.
    rows = [line for line in done.stdout.splitlines() if line.startswith("stage ")]
    assert rows[0].rstrip() == "stage 0  0 1    0<<< 21<<< 32<<<  3<<<"
    assert rows[1].rstrip() == "stage 1    00<<< 11<<< 22<<< 33<<<"


def test_host_memory_of_copies_is_printed(megascale):
    arguments = ["--gpus", "16", "--model.preset=gpt-13b", "--parallel.tensor=2", "--parallel.pipeline=2"]
    arguments += ["--train.global_batch=64", "--checkpoint.background=true", "--checkpoint.slots=2"]
    arguments += ["--checkpoint.replicas=true"]
    result = megascale("plan", *arguments)
    assert result.returncode == 0, result.stderr
    pattern = r"host memory: (\S+) GiB per rank, (\S+) GiB per host of 8 ranks: (\S+) snapshots .* (\S+) copies"
    per_rank, per_host, snapshots, replicas = map(float, re.search(pattern, result.stdout).groups())
    assert per_host == pytest.approx(8 * per_rank, abs=0.1)
    assert snapshots + replicas == pytest.approx(per_rank, abs=0.02)
    record = json.loads(megascale("plan", *arguments, "--json").stdout)
    by_stage = record["host_memory_by_stage"]
    assert max(memory["total"] for memory in by_stage) / 2**30 == pytest.approx(per_rank, abs=0.01)
    # Without copies of other hosts, all ranks of a run together hold two checkpoints.
    assert 8 * sum(memory["snapshots"] for memory in by_stage) == pytest.approx(2 * 12 * record["parameters"], rel=0.01)
    assert "host memory" not in megascale("plan", *arguments[:6]).stdout
    few = megascale(
        "plan", "--gpus", "2", "--model.preset=gpt-13b", "--parallel.data=2", "--checkpoint.background=true"
    )
    per_rank, per_host = map(
        float, re.search(r"(\S+) GiB per rank, (\S+) GiB per host of 2 ranks", few.stdout).groups()
    )
    assert per_host == pytest.approx(2 * per_rank, abs=0.1)


def test_the_bars_of_memory_add_up_to_the_total():
    from matplotlib.figure import Figure

    from megascale.simulate.planner.schedule_picture import _draw_memory

    arguments = ["model.preset=gpt-13b", "model.layers=20", "train.linear_precision=float8", "kernels.graphs=on"]
    arguments += ["parallel.pipeline=2", "train.precision=bfloat16", "train.micro_batch=1"]
    plan = make_plan(load(None, arguments), 2, 180.0)
    assert min(plan.memory[0].graph_buffers, plan.memory[0].weight_copies) > 0
    axes = Figure().subplots()
    _draw_memory(axes, plan)
    heights = [bars.patches[0].get_height() for bars in axes.containers]
    assert sum(heights) == pytest.approx(plan.memory[0].total / GIB + RESERVE_GIB)


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_plot_is_drawn(tmp_path, suffix):
    from megascale.simulate.planner.schedule_picture import save_png

    file = tmp_path / f"plan.{suffix}"
    save_png(example(), file)
    head = file.read_bytes()[:8]
    assert head.startswith(b"\x89PNG" if suffix == "png" else b"%PDF")
    assert file.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "code", "needles"),
    [
        (["--parallel.tensor=7"], 3, ["model.heads=128", "--parallel.tensor=4 or 8", "model.sequence_length=2048"]),
        (["--parallel.pipeline=9"], 3, ["12288 ranks", "tensor=8 x parallel.pipeline=9"]),
        (["--parallel.virtual_stages=13"], 3, ["model.layers=96", "104 model chunks", "at most 96"]),
        (["--train.global_batch=6145"], 3, ["train.global_batch=6145", "--train.global_batch=6144"]),
        (["--parallel.data=100"], 3, ["parallel.data=100", "leave 192"]),
        (["--model.vocab_size=50257", "--model.vocab_multiple=1"], 3, ["padded vocabulary 50257", "vocab_multiple=8"]),
        (["--parallel.layer_split=90,6"], 3, ["layer_split=[90, 6]", "48 model chunks"]),
        (
            ["--parallel.micro_batch_group_size=4"],
            3,
            ["micro_batch_group_size=4 is less than parallel.pipeline=8", "--parallel.micro_batch_group_size=8"],
        ),
        (
            ["--parallel.virtual_stages=1", "--parallel.micro_batch_group_size=9"],
            3,
            ["micro_batch_group_size=9", "--parallel.virtual_stages=2"],
        ),
        (
            ["--parallel.pipeline=1", "--parallel.micro_batch_group_size=6", "--parallel.zero=2"],
            3,
            ["pipeline=1 cannot be combined with parallel.zero=2", "--parallel.zero=1"],
        ),
        (["--device-gib", "20"], 3, ["29.8 GiB", "20 GiB"]),
        (["--parallel.tensr=8"], 2, ["parallel.tensr", "parallel.tensor"]),
        (["--device", "abacus"], 2, ["'abacus'", "--device-gib"]),
        (["--gpus", "0"], 2, ["--gpus"]),
    ],
)
def test_what_does_not_work_is_named(megascale, arguments, code, needles):
    gpus = [] if "--gpus" in arguments else ["--gpus", 12288]
    done = megascale("plan", EXAMPLE, *gpus, *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    for needle in needles:
        assert needle in " ".join(done.stderr.split())


@pytest.mark.parametrize("arguments", [[], ["--parallel.pipeline=1", "--parallel.micro_batch_group_size=4"]])
def test_long_rounds_in_a_plan(megascale, arguments):
    """The example for slow networks fits as it is; on one stage it does not, and what would fit is named."""
    vocabulary = "--model.vocab_size=50304"
    done = megascale("plan", SLOW, "--gpus", 8, "--device", "H200", vocabulary, *arguments)
    assert done.returncode == (3 if arguments else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert f"rounds of {4 if arguments else 8}" in " ".join(done.stdout.replace("│", "").split())
    if arguments:
        assert "--parallel.recompute=full makes it fit" in " ".join(done.stderr.split())


def test_short_rounds_are_a_remedy():
    arguments = ["parallel.micro_batch_group_size=8", "model.vocab_size=50304", "parallel.recompute=none"]
    plan = make_plan(load(SLOW, arguments), 8, 141.0)
    assert not plan.fits
    assert "--parallel.micro_batch_group_size=2" in plan.remedies()


def test_all_faults_are_named_at_once():
    config = from_tree(
        {
            "model": {"layers": 2, "hidden": 96, "heads": 6, "vocab_size": 100, "vocab_multiple": 2},
            "parallel": {"tensor": 4, "pipeline": 1, "virtual_stages": 3},
        }
    )
    with pytest.raises(FitError) as failure:
        lay_out(config, 6)
    message = str(failure.value)
    for needle in (
        "model.heads=6",
        "--parallel.micro_batch_group_size to the micro-batches",
        "6 ranks cannot",
        "model.layers=2",
    ):
        assert needle in message
    assert len(message.splitlines()) == 4


def test_near_divisors():
    assert nearest_divisors(12, 5) == [4, 6]
    assert nearest_divisors(7, 9) == [7]
    assert nearest_divisors(8, 8) == [8]


def test_remedies_do_make_it_fit():
    config = load(
        EXAMPLE,
        ["parallel.tensor=8", "parallel.virtual_stages=1", "train.micro_batch=4", "parallel.zero=0"],
    )
    plan = make_plan(config, 12288, 80.0)
    assert not plan.fits
    remedies = plan.remedies()
    assert "--parallel.zero=1" in remedies
    for remedy in remedies:
        repeated = load(
            EXAMPLE,
            ["parallel.virtual_stages=1", "train.micro_batch=4", "parallel.zero=0", remedy],
        )
        assert make_plan(repeated, 12288, 80.0).fits


def test_graphs_are_left_out_where_they_do_not_fit():
    """Five chunks in one round of eight: each keeps the memory of each of its micro-batches for its graphs."""
    arguments = ["parallel.virtual_stages=5", "parallel.micro_batch_group_size=8", "parallel.recompute=selective"]
    arguments += ["train.micro_batch=1", "train.global_batch=16", "train.precision=bfloat16", "model.vocab_size=50304"]
    arguments += ["model.preset=gpt-13b", "model.layers=20"]
    plan = make_plan(load(None, arguments + ["kernels.graphs=on"]), 2, 120.0)
    assert not plan.fits
    assert "--kernels.graphs=auto" in plan.remedies()
    assert plan.memory[0].graph_buffers > 0
    auto = make_plan(load(None, arguments), 2, 120.0)
    assert auto.fits
    assert auto.memory[0].graph_buffers == 0
    assert make_plan(load(None, arguments), 2, 180.0).memory[0].graph_buffers > 0


def test_notes():
    assert [note for note in example().notes() if "does not pay" not in note] == []
    assert "does not pay" in " ".join(example("model.window=512").notes())
    assert "does not pay" not in " ".join(example("model.window=1024", "model.sequence_length=8192").notes())
    assert "whole sequence" in " ".join(example("model.window=4096").notes())
    assert "uneven" in " ".join(example("model.layers=95").notes())
    assert "cannot fill 8 stages" in " ".join(example("train.global_batch=768").notes())
    assert "reduces gradients 32 times" in " ".join(example("parallel.zero=2").notes())
    assert "and saves 8." in " ".join(example("parallel.zero=2").notes())
    assert "and saves 8." in " ".join(example("parallel.zero=2", "parallel.virtual_stages=1").notes())
    collectives = "by collectives (its ranks are on several hosts of 8 GPUs)"
    sharded_notes = " ".join(example("parallel.zero=3").notes())
    assert f"gathers 25 GiB of parameters per rank and step {collectives}, and saves 10." in sharded_notes
    one_host = make_plan(
        load(None, ["model.preset=llama-8b", "model.vocab_size=128256", "train.micro_batch=1", "parallel.zero=3"]),
        gpus=8,
        device_gib=80.0,
    )
    assert "times per step by copy engines where" in " ".join(one_host.notes())
    assert "of parameters per rank and step by copy engines, and" in " ".join(one_host.notes())
    alone = make_plan(load(None, ["model.preset=gpt2-124m", "model.vocab_size=50304", "parallel.zero=3"]), 1, 80.0)
    assert "parallel.zero=3 shards nothing" in " ".join(alone.notes())


def test_kept_layers_are_proposed_where_they_fit():
    """GPT 13B in DP4: each of 40 layers has 0.59 GiB, and all 40 fit a B200."""
    arguments = ["model.preset=gpt-13b", "model.vocab_size=50304", "train.precision=bfloat16", "train.micro_batch=1"]
    arguments += ["train.global_batch=32", "parallel.recompute=selective", "parallel.zero=3"]

    def plan(gib: float, *more: str) -> LayoutCost:
        return make_plan(load(None, [*arguments, *more]), 4, gib)

    assert "--parallel.zero3_keep_layers=20 fits too, and gathers 137 GiB" in " ".join(plan(80.0).notes())
    assert "--parallel.zero3_keep_layers=40 fits too" in " ".join(plan(180.0).notes())
    for notes in (
        plan(80.0, "parallel.zero3_keep_layers=20").notes(),
        plan(72.0, "parallel.virtual_stages=4", "parallel.micro_batch_group_size=8").notes(),
        plan(180.0, "parallel.zero=1").notes(),
    ):
        assert "zero3_keep_layers" not in " ".join(notes)
    # With 39 layers kept the last one needs a single shared slot, so 40 need as much memory.
    all_layers_gib = plan(180.0, "parallel.zero3_keep_layers=40").needed_gib
    assert plan(180.0, "parallel.zero3_keep_layers=39").needed_gib == all_layers_gib
    assert "--parallel.zero3_keep_layers=40 fits too" in " ".join(plan(all_layers_gib + 0.01).notes())
    # Slots with copies of own shards need 0.15 GiB more for each kept layer.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARD_SWITCH, "0")
        assert "--parallel.zero3_keep_layers=15 fits too, and gathers 170 GiB" in " ".join(plan(80.0).notes())
        # Two shared slots exist even if a single layer uses them.
        copied_gib = plan(180.0, "parallel.zero3_keep_layers=40").needed_gib
        assert plan(180.0, "parallel.zero3_keep_layers=39").needed_gib > copied_gib
    too_many = plan(80.0, "parallel.zero3_keep_layers=30")
    assert not too_many.fits
    assert "--parallel.zero3_keep_layers=0" in too_many.remedies()


def test_zero_3_is_proposed_where_only_it_fits():
    """gpt-13b on four H100s has 72 GB of state per GPU even with ZeRO-2."""
    arguments = ["model.preset=gpt-13b", "model.vocab_size=50304", "train.precision=bfloat16", "train.micro_batch=1"]
    arguments += ["train.global_batch=16", "parallel.recompute=full"]
    plan = make_plan(load(None, arguments), 4, 80.0)
    assert not plan.fits
    assert plan.remedies() == ["--parallel.zero=3", "--optimizer.offload=true"]
    assert make_plan(load(None, arguments + ["parallel.zero=3"]), 4, 80.0).fits
    # Adapters leave the model whole on every rank.
    adapters = make_plan(load(None, arguments + ["train.lora.rank=8"]), 4, 20.0)
    assert "--parallel.zero=3" not in adapters.remedies()
    assert "beyond a host of 4" in " ".join(example("parallel.gpus_per_host=4").notes())


def test_bubble_and_idle_of_uneven_stages():
    even = make_plan(load(EXAMPLE, ["model.vocab_size=2"]), 12288, 80.0)
    assert even.bubble == pytest.approx(7 / (6 * 32), rel=2e-3)
    uneven = make_plan(load(EXAMPLE, ["parallel.layer_split=" + ",".join(["3"] + (["2"] * 46) + ["1"])]), 12288, 80.0)
    assert uneven.idle > even.idle


def test_a_remedy_that_other_settings_exclude_is_not_proposed():
    overrides = ["model.preset=llama-8b", "model.sequence_length=8192", "train.micro_batch=1", "train.global_batch=4"]
    plan = make_plan(load(None, overrides + ["train.lora.rank=8", "train.precision=bfloat16"]), 1, 40.0)
    assert not plan.fits
    assert plan.remedies() == ["--parallel.recompute=full"]


def planned(**sections: dict) -> LayoutCost:
    tree = {"model": {"preset": "gpt-13b"}, "train": {"micro_batch": 4, "global_batch": 64}, "data": {}}
    parallel = {"tensor": 2, "pipeline": 2, "virtual_stages": 2} | sections.pop("parallel", {})
    return make_plan(from_tree(tree | sections | {"parallel": parallel}), 8, 141.0)


def test_a_split_that_fills_the_bubble_is_named_with_what_it_brings():
    plan = planned()
    split, gain = plan.faster_split
    better = planned(parallel={"layer_split": split})
    assert better.timeline.makespan == pytest.approx((1 - gain) * plan.timeline.makespan)
    assert gain > 0.03
    assert sum(split[0::2]) > sum(split[1::2])  # the first stage has more
    note = next(n for n in plan.notes() if "layer_split" in n)
    assert str(split).replace(" ", "") in note
    assert f"{better.needed_gib - plan.needed_gib:.1f} GiB more" in note
    assert not any("fills the bubble" in n for n in better.notes())


def test_float8_moves_more_layers_off_the_last_stage():
    """Its layers are cheaper and its logits are not."""
    shape = {"model": {"preset": "gpt-13b", "layers": 20}, "data": {}, "parallel": {"pipeline": 2, "virtual_stages": 5}}
    for kind, last in (("default", [2.5, 2.5, 1]), ("float8", [2, 3, 1])):
        train = {"micro_batch": 2, "global_batch": 16, "linear_precision": kind}
        split, _ = make_plan(from_tree(shape | {"train": train}), 2, 141.0).faster_split
        assert split == [2] * 7 + last


def test_a_faster_split_that_does_not_fit_is_not_named():
    tight = planned()
    small = LayoutCost(tight.layout, tight.needed_gib + 0.1)
    assert small.fits
    assert not any("fills the bubble" in n for n in small.notes())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 6))
def test_faster_splits_are_splits_and_are_faster(stages, virtual, batch, more):
    layers = stages * virtual + more
    shape = {"layers": layers, "hidden": 64, "heads": 4, "sequence_length": 64, "vocab_size": 4096}
    virtual = virtual if stages > 1 else 1
    tree = {"model": shape, "train": {"micro_batch": 1, "global_batch": batch}, "data": {}}
    layout = {"pipeline": stages, "virtual_stages": virtual}
    plan = make_plan(from_tree(tree | {"parallel": layout}), stages, 80.0)
    if plan.faster_split is not None:
        split, gain = plan.faster_split
        second = make_plan(from_tree(tree | {"parallel": layout | {"layer_split": split}}), stages, 80.0)
        assert sum(split) == layers
        assert min(split) >= 0.5
        assert 0.005 < gain < 1
        assert second.timeline.makespan == pytest.approx((1 - gain) * plan.timeline.makespan)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--train.global_batch=100000000", "--train.micro_batch=1"],
        ["--train.global_batch=4000000", "--train.micro_batch=1"],
        ["--model.layers=10000", "--parallel.pipeline=8", "--parallel.virtual_stages=1000", "--train.global_batch=800"],
    ],
)
def test_a_step_of_too_many_forward_passes_is_refused_before_its_schedule_is_made(arguments):
    with pytest.raises(FitError, match=r"train.global_batch=\d+ is .* forward passes .* lower train.global_batch to"):
        lay_out(load(None, ["--model.vocab_size=1000"] + list(arguments)), 8)


def test_the_deepest_model_and_the_longest_pipeline_are_planned_at_once():
    arguments = ["--model.vocab_size=1000", "--model.layers=10000", "--train.global_batch=4", "--train.micro_batch=1"]
    layout = lay_out(load(None, arguments + ["--parallel.pipeline=1000", "--parallel.virtual_stages=10"]), 1000)
    assert [chunk.layer_count for chunk in layout.layers] == [1] * 10_000
    # Near sizes of a tensor-parallel width that divides nothing: by roots, not by counting to a billion.
    sizes = ["--model.sequence_length=1000000000", "--model.heads=1000000", "--model.hidden=1000000"]
    sizes += ["--model.ffn_hidden=100000000", "--model.vocab_multiple=1000000", "--model.vocab_size=1000000000"]
    wide = load(None, ["--train.micro_batch=1", "--parallel.tensor=7"] + sizes)
    with pytest.raises(FitError, match=r"is not divisible by parallel\.tensor=7"):
        lay_out(wide, 7)


def test_context_parallelism_is_proposed_for_long_sequences(megascale):
    """One GPU does not hold 131,072 tokens of 8 layers; a slice of a quarter fits, and saves full recomputation."""
    arguments = ["plan", "--gpus", 4, "--device", "H100", "--model.preset=llama-8b", "--model.layers=8"]
    arguments += ["--model.sequence_length=131072", "--train.micro_batch=1", "--train.global_batch=4"]
    done = megascale(*arguments, "--train.precision=bfloat16")
    assert done.returncode == 3
    assert "--parallel.context=4" in done.stderr
    noted = " ".join(megascale(*arguments, "--train.precision=bfloat16", "--parallel.recompute=full").stdout.split())
    assert "--parallel.context=4 --parallel.recompute=none fits too" in noted
    divided = megascale(*arguments, "--train.precision=bfloat16", "--parallel.context=4")
    assert divided.returncode == 0
    assert "tensor 1 x context 4 x data 1 x pipeline 1" in " ".join(divided.stdout.replace("│", "").split())


def test_the_vocabulary_is_that_of_the_data(tmp_path, megascale):
    built = megascale("data", "build", "--input", __file__, "--vocab-size", 300, "--out", tmp_path / "tokens")
    assert built.returncode == 0, built.stderr
    settings = ("--gpus", 2, "--parallel.data=2", f"--data.train={tmp_path}/tokens/train", "--train.global_batch=16")
    assert "fits" in megascale("plan", *settings).stdout
    unreadable = megascale("plan", *settings[:3], f"--data.train={tmp_path}/elsewhere/train")
    assert unreadable.returncode == 2
    assert "the data set with the tokenizer cannot be read" in unreadable.stderr
    assert "set --model.vocab_size=N" in unreadable.stderr
