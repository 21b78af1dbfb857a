"""float8, Megatron's selective recomputation, context parallelism, experts, cost: limits that any of them must keep."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale import config as configuration
from megascale.cli.main import app
from megascale.core.copy_choice import SHARD_SWITCH
from megascale.errors import ConfigError, FitError
from megascale.simulate.calibration import Calibration, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import BUCKETS, compute_step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.effective import (
    FaultRates,
    compute_young_daly_interval,
    estimate_first_order_share,
    simulate_run,
)
from megascale.simulate.exposed_communication import SHARD_KERNEL_SHARE
from megascale.simulate.kernel_times import gemm_seconds
from megascale.simulate.prediction_band import estimate_band_width
from megascale.simulate.run_cost import estimate_run_cost
from megascale.simulate.scenario import Scenario, make_baseline_software, make_engine_software
from megascale.simulate.sensitivity import compute_sensitivities
from megascale.simulate.series import vary_scenario
from megascale.simulate.software import MEGASCALE_H200, MEGATRON_2023, RECOMPUTE, find_stack
from megascale.simulate.stage_times import compute_stage_times
from megascale.simulate.step import estimate_step
from tests.simulate.simulator_cases import GPT_13B, GPT_175B, case, with_part

H200 = load_cluster("h200-host")


def step_json(*arguments: str) -> list[dict]:
    """Return the JSON of `simulate step --json` for both stacks."""
    done = CliRunner().invoke(app, ["simulate", "step"] + list(arguments) + ["--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def parts(single: Case) -> dict[str, float]:
    return {k: float(v) for k, v in compute_step_parts(H200, single).as_dict().items()}


def moe(**more) -> Case:
    return Case.from_model(GPT_13B, MEGASCALE_H200, tensor=1, pipeline=1, virtual=1, data=8, micro=2, batch=64, **more)


def test_float8_is_faster_by_less_than_the_peaks():
    plain = moe()
    fast = replace(plain, float8=True)
    assert 1.2 < parts(plain)["gemm"] / parts(fast)["gemm"] < 2.0
    assert parts(plain)["attention"] == parts(fast)["attention"]


FLOAT8 = ["--model.preset=gpt-13b", "--model.layers=20", "--gpus", "2", "--cluster", "h200-host"]
FLOAT8 += ["--parallel.tensor=2", "--train.micro_batch=4", "--train.global_batch=16"]
FLOAT8 += ["--train.linear_precision=float8"]


def test_the_stack_compared_with_is_priced_in_the_same_precision():
    """Megatron-Core with TransformerEngine took 1.10 to 1.12 times our step in float8 on H200 and H100."""
    first, second = step_json(*FLOAT8, "--against", "megatron-core-h200")
    assert first["precision"] == second["precision"] == "float8"
    assert 1.05 < first["seconds"] / second["seconds"] < 1.2


def test_a_stack_without_float8_says_in_what_it_is_priced():
    first, second = step_json(*FLOAT8, "--against", "megatron-deepspeed", "--model.layers=4")
    assert (first["precision"], second["precision"]) == ("bfloat16", "float8")
    assert "megatron-deepspeed has no float8: it is priced in bfloat16" in first["cautions"]
    assert not any("no float8" in text for text in second["cautions"])


def test_float8_is_refused_on_a_gpu_that_has_none():
    config = configuration.load("examples/gpt-175b.toml", ["train.linear_precision=float8"])
    machine = load_cluster("a100-roce")
    software = make_engine_software(config, find_stack("megascale"))
    scenario = Scenario(config, 256, machine, load_calibration(None, machine.name), software)
    with pytest.raises(ConfigError, match="A100-SXM4-80GB no float8 rate"):
        estimate_step(scenario)


def test_a_varied_setting_changes_the_stack_that_it_decides():
    config = configuration.load(None, ["model.preset=gpt-13b", "model.layers=20", "train.global_batch=64"])
    base = find_stack("megascale-h200")
    calibration = Calibration("none", H200.name)
    scenario = Scenario(config, 8, H200, calibration, make_engine_software(config, base), base=base)
    values = {"parallel.recompute": ("none", "full"), "train.linear_precision": ("default", "float8")}
    values |= {"model.block": ("serial", "parallel"), "overlap.data": (True, False)}
    for key, choices in values.items():
        first, second = (
            estimate_step(vary_scenario(scenario, key, value), check_memory=False).seconds for value in choices
        )
        assert abs(first / second - 1.0) > 1e-3, key


@pytest.mark.parametrize("name", ["float8", "default"])
def test_a_step_hangs_on_the_gpu_s_peak_in_either_precision(name):
    arguments = [word.removeprefix("--") for word in FLOAT8 if "=" in word]
    config = configuration.load(None, arguments + [f"train.linear_precision={name}"])
    base = find_stack("megascale-h200")
    calibration = load_calibration("h200-engine", H200.name)
    changes = compute_sensitivities(
        Scenario(config, 2, H200, calibration, make_engine_software(config, base), base=base)
    )
    slower, faster = changes["GPU peak"]
    assert slower > 0.1
    assert faster < -0.07
    # The calibration replaces the cluster's residual, so that is what must change.
    assert changes["TP overlap residual"][0] < -0.005


SHARDED = ["--model.preset=llama-8b", "--gpus", "64", "--cluster", "h100-dgx", "--train.global_batch=64", "--against"]
SHARDED += ["none", "--train.micro_batch=1"]


def test_experts_have_no_price_and_are_refused_by_name():
    model = configuration.load(None, ["model.preset=mixtral-8x7b"]).model
    with pytest.raises(FitError, match=r"model\.mlp=experts has no price"):
        Case.from_model(model, MEGASCALE_H200, tensor=8, pipeline=1, virtual=1, data=1, micro=1, batch=8)


def test_full_sharding_is_priced_by_what_its_gathers_and_reductions_cannot_hide():
    h100 = load_cluster("h100-dgx")
    model = configuration.load(None, ["model.preset=llama-8b"]).model
    layout = {"tensor": 1, "pipeline": 1, "virtual": 1, "data": 64, "micro": 1}
    retained, sharded = (
        Case.from_model(model, replace(find_stack("megatron-fsdp"), full_sharding=on), batch=64, **layout)
        for on in (False, True)
    )
    seconds = {
        item: float(compute_step_parts(h100, retained if item == "kept" else sharded).data)
        for item in ("kept", "sharded")
    }
    assert seconds["sharded"] > 1.5 * seconds["kept"] > 0
    # Each micro-batch gathers and reduces again; replicas that keep their weights do so once per step.
    four = Case.from_model(model, find_stack("megatron-fsdp"), batch=256, **layout)
    assert float(compute_step_parts(h100, four).data) > 3 * seconds["sharded"]
    # Links too slow to hide anything: three times the weights per layer cross them, two gathers and a reduction.
    slow = with_part(h100, "between", bus=[[2, 0.4]], gbs=0.5)
    weights = 32 * float(sharded.layer_parameters)
    wire = weights * (2 + 2 + 2) * 63 / 64 / (8 * 0.4e9)
    assert float(compute_step_parts(slow, sharded).data) == pytest.approx(wire, rel=0.25)
    copied = replace(sharded, shard_copies=True)
    assert float(compute_step_parts(h100, copied).data) > seconds["sharded"]


def test_one_data_parallel_rank_has_no_transfers_by_copies():
    h100 = load_cluster("h100-dgx")
    model = configuration.load(None, ["model.preset=llama-8b"]).model
    software = replace(find_stack("megatron-fsdp"), full_sharding=True, unit_slots=True, shard_copies=False)
    seconds = []
    for has_copies in (False, True):
        copied = replace(software, copied_gathers=has_copies, copied_reductions=0 if has_copies else np.inf)
        layout = Case.from_model(model, copied, tensor=1, pipeline=1, virtual=1, data=1, micro=1, batch=4)
        seconds.append(float(compute_step_parts(h100, layout).data))
    assert seconds[0] == seconds[1] == 0


def test_full_sharding_on_the_command_line():
    (result,) = step_json(*SHARDED, "--software", "megatron-fsdp", "--no-memory")
    assert result["parts"]["data"] > 0.02 * result["seconds"]
    with pytest.raises(ConfigError, match="closed form only"):
        CliRunner().invoke(
            app,
            ["simulate", "step"] + SHARDED + ["--software", "megatron-fsdp", "--no-memory", "--level", "event"],
            catch_exceptions=False,
        )


def test_memory_of_another_stack_is_not_claimed():
    with pytest.raises(FitError, match=r"the figure is this engine.s; nemo needs another amount.*--no-memory"):
        step_json(*SHARDED, "--software", "nemo", "--model.layers=128")
    arguments = ["--software", "nemo", "--model.layers=128", "--no-memory"]
    (result,) = step_json(*SHARDED, *arguments)
    assert result["memory_gib"] > 80
    assert any("memory is this engine's" in text for text in result["cautions"])
    shown = CliRunner().invoke(app, ["simulate", "step"] + SHARDED + arguments, catch_exceptions=False).stdout
    assert "GiB, with this engine" in shown
    (local,) = step_json(*SHARDED, "--no-memory")
    assert not any("memory" in text for text in local["cautions"])


def test_each_stack_has_its_own_constants_and_a_band_by_what_is_known_of_it():
    machine, single = load_cluster("h100-host"), case(1, 1, 1, 1, 1, 8, MEGASCALE_H200, GPT_13B)
    assert load_calibration(None, machine.name, "megascale").name == "h100-engine"
    assert load_calibration(None, machine.name, "megatron-core").name == "h100-host"
    assert load_calibration(None, "h100-dgx", "nemo").name == "h100-nemo"
    assert load_calibration(None, "h100-dgx", "fsdp").name == "uncalibrated"

    def width(cluster, calibration, family):
        return estimate_band_width(cluster, single, calibration, family)

    plain = Calibration("none", machine.name)
    expected = width(machine, plain, "megascale")
    stranger = width(machine, plain, "somebody")
    assert expected.reasons == ()
    assert "no step of stack somebody was ever compared" in stranger.reasons[0]
    assert stranger.spread > 2 * expected.spread
    moon = machine.model_copy(update={"name": "moon"})
    far = width(moon, Calibration("none", "moon"), "megascale")
    assert "no step of machine moon" in far.reasons[0]
    # Constants of another stack, and of another stack on an unmeasured machine.
    engine = load_calibration("h100-engine", machine.name)
    local, second, worst = (
        width(cluster, engine, family)
        for cluster, family in ((machine, "megascale"), (machine, "nemo"), (moon, "somebody"))
    )
    assert "not nemo" in second.reasons[0]
    assert local.spread < second.spread < worst.spread
    assert "machine moon or of stack somebody" in " ".join(worst.reasons)


def test_a_step_that_launches_bound_is_less_sure():
    arguments = ["--model.preset=gpt2-124m", "--gpus", "2", "--cluster", "h100-host", "--parallel.tensor=2"]
    arguments += ["--train.micro_batch=1", "--train.global_batch=8", "--against", "megatron-core-h200"]
    theirs, ours = step_json(*arguments)
    assert any("kernel launches bound this step" in text for text in theirs["cautions"])
    assert not any("launches" in text for text in ours["cautions"])
    assert theirs["p90"] / theirs["p10"] > 1.35 > ours["p90"] / ours["p10"]


def test_a_tied_embedding_is_summed_over_first_and_last_stage():
    single = case(1, 2, 1, 1, 1, 8, MEGATRON_2023, GPT_13B)
    free = replace(single, tied=False)
    extra = float(compute_step_parts(H200, single).data - compute_step_parts(H200, free).data)
    assert extra == pytest.approx(50304 * 5120 * 4 / 93e9, rel=0.05)
    assert float(compute_step_parts(H200, replace(single, pipeline=1, middle_layers=40, last_layers=40)).data) == 0


def test_recomputing_core_attention_costs_its_forward_and_less_than_the_layer():
    a100 = load_cluster("a100-roce")
    software = replace(MEGATRON_2023, attention="unfused")
    seconds = {
        kind: float(compute_step_parts(a100, case(software=replace(software, recompute=kind), batch=64)).recompute)
        for kind in RECOMPUTE
    }
    assert 0 == seconds["none"] < seconds["core-attention"] < seconds["full"]
    attention = float(compute_step_parts(a100, case(software=software, batch=64)).attention)
    assert 0.25 * attention < seconds["core-attention"] < 0.5 * attention


def test_a_sequence_over_more_ranks_shares_the_work_and_pays_for_the_exchange():
    single = replace(moe(), sequence=16384)
    cut = replace(single, context=8, data=1)
    assert float(cut.gpus) == float(single.gpus)
    assert float(cut.flops) == float(single.flops)
    # A rank has as many tokens per step as before; its queries, keys, values and results travel.
    assert parts(cut)["attention"] == pytest.approx(parts(single)["attention"], rel=0.25)
    # The longer the sequence, the smaller the share of the exchange.
    long = replace(cut, sequence=262144)
    assert parts(cut)["exchange"] / parts(cut)["attention"] > 1.5 * parts(long)["exchange"] / parts(long)["attention"]
    fast = with_part(H200, "inside", bus=[[2, 1e6]], latency_us=0.0, hop_us=0.0)
    assert float(compute_step_parts(fast, cut).exchange) < 0.01 * parts(cut)["exchange"]
    assert parts(single)["exchange"] == 0


def test_experts_add_weights_and_exchanges_but_no_work():
    dense, sparse = moe(), moe(experts=8, top_k=1, expert_parallel=8)
    assert float(sparse.flops) == float(dense.flops)
    assert float(sparse.layer_parameters) == float(dense.layer_parameters)
    assert parts(dense)["exchange"] == 0 < parts(sparse)["exchange"]
    two = moe(experts=8, top_k=2, expert_parallel=8)
    assert parts(two)["exchange"] == pytest.approx(2 * parts(sparse)["exchange"], rel=0.05)
    assert parts(two)["gemm"] > 1.4 * parts(sparse)["gemm"]
    stored = moe(experts=8, top_k=1, expert_parallel=1)
    assert float(stored.layer_parameters) > 5 * float(dense.layer_parameters)
    assert not moe(experts=8, top_k=9).fits()
    assert not moe(experts=8, expert_parallel=3).fits()


def scenario(*settings: str, **more) -> Scenario:
    config = configuration.load(None, ["model.preset=gpt-13b", "train.global_batch=64"] + list(settings))
    return Scenario(
        config,
        8,
        H200,
        Calibration("none", "h200-host"),
        make_engine_software(config, find_stack("megascale-h200")),
        **more,
    )


def test_parameters_travel_as_the_configuration_gathers_them():
    """Float8 parameters take almost half as long. Gradients take the same time."""
    float8 = "train.linear_precision=float8"
    halved, plain = (scenario(float8, *more).make_case() for more in (("parallel.gather_precision=float8",), ()))
    assert (halved.gather_bytes, plain.gather_bytes) == (1, 2)
    short, long = (float(compute_stage_times(H200, item).gather) for item in (halved, plain))
    assert 0.5 * long < short < 0.55 * long
    assert float(compute_stage_times(H200, halved).scatter) == float(compute_stage_times(H200, plain).scatter)
    for peer in (scenario(), scenario(float8, "parallel.zero=0"), scenario("train.linear_precision=float8_rowwise")):
        assert peer.make_case().gather_bytes == 2


def test_reductions_of_each_micro_batch_slow_the_backwards():
    """ZeRO-2 without a pipeline is slower than ZeRO-1, by the cluster's slow-down next to all but the last bucket."""
    settings = "model.layers=8", "train.micro_batch=1"
    each, once = (estimate_step(scenario(*settings, f"parallel.zero={zero}")) for zero in (2, 1))
    scatter = float(compute_stage_times(H200, scenario(*settings, "parallel.zero=1").make_case()).scatter)
    slowed = 8 * scatter * (BUCKETS - 1) / BUCKETS
    slowdown = H200.overlap.slowdown
    assert each.seconds - once.seconds == pytest.approx(slowdown / (1 + slowdown) * slowed)


def test_kept_layers_save_their_gathers():
    """A quarter of the blocks is gathered once per step, and all others are as before."""
    settings = "parallel.zero=3", "model.layers=8", "train.micro_batch=1"
    kept, plain = (scenario(*settings, f"parallel.zero3_keep_layers={count}") for count in (2, 0))
    assert plain.make_case().gather_share == 1
    # Eight micro-batches gather eight blocks twice, except two blocks at each of 15 turns, which are in their slots.
    assert kept.make_case().gather_share == pytest.approx((16 * 6 - 2 * 15 + 2) / (16 * 8 - 2 * 15))
    assert estimate_step(kept).seconds < estimate_step(plain).seconds
    # Another trainer has no such layers.
    software = make_baseline_software(kept.config, find_stack("megatron-fsdp"))
    peer = estimate_step(replace(kept, software=software, is_baseline=True))
    assert "parallel.zero3_keep_layers saves gathers of this engine only" in peer.cautions


def test_copies_of_own_shards_are_kernels(monkeypatch):
    """Two gathers of a layer and micro-batch read and write an eighth of its parameters."""
    mapped = estimate_step(scenario("parallel.zero=3", "model.layers=8"))
    monkeypatch.setenv(SHARD_SWITCH, "0")
    copied_scenario = scenario("parallel.zero=3", "model.layers=8")
    case = copied_scenario.make_case()
    copied_bytes = SHARD_KERNEL_SHARE * 2 * 2 * 2 * case.layer_parameters / 8
    bandwidth = H200.gpu.memory_gbs * 1e9 * H200.kernels.memory
    seconds = 8 * case.microbatches * copied_bytes / bandwidth
    assert estimate_step(copied_scenario).seconds - mapped.seconds == pytest.approx(seconds)


_GPT = ["gpt-13b", "model.vocab_size=50304", "parallel.recompute=selective", "kernels.graphs=on"]
_COPIES = ["parallel.zero=3", "parallel.reduce_dtype=bfloat16", "overlap.gathers=copies", "overlap.reductions=copies"]
_SMALL = ["llama-8b", "model.layers=28", "model.hidden=3072", "model.heads=24", "model.ffn_hidden=8192"]
_SMALL += ["model.tied_embeddings=true", "train.global_batch=8", "parallel.recompute=selective"]


# Ratios of tokens/s per GPU of dev/log.md, 2026-11-28. For 40 layers the ratio is per layer.
@pytest.mark.parametrize(
    ("gpus", "settings", "layers", "switch", "measured"),
    [
        (2, [*_GPT, "train.global_batch=16"], (20, 20), "1", 0.985),
        (2, [*_GPT, "train.global_batch=16"], (20, 20), "0", 0.958),
        (2, _SMALL, (28, 28), "1", 0.978),
        (4, [*_GPT, "train.global_batch=32"], (20, 40), "0", 0.917),
    ],
)
def test_zero_3_next_to_zero_1_is_priced_as_measured(monkeypatch, gpus, settings, layers, switch, measured):
    preset, *settings = settings
    seconds = []
    for count, sharding in zip(layers, (["parallel.zero=1"], _COPIES), strict=True):
        own_sharding = sharding
        if preset == "llama-8b":
            own_sharding = sharding[:1]
        if count == 40:
            own_sharding = [*sharding, "parallel.zero3_keep_layers=8"]
        common = [f"model.preset={preset}", "train.micro_batch=1", f"model.layers={count}"]
        monkeypatch.setenv(SHARD_SWITCH, switch)
        config = configuration.load(None, [*settings, *common, *own_sharding])
        software = make_engine_software(config, find_stack("megascale-h200"))
        run = Scenario(config, gpus, H200, Calibration("none", "h200-host"), software)
        seconds.append(estimate_step(run, check_memory=False).seconds)
    ratio = layers[1] / layers[0] * seconds[0] / seconds[1]
    assert ratio == pytest.approx(measured, abs=0.02)


def test_a_scenario_says_what_is_not_counted_and_refuses_what_does_not_divide():
    result = estimate_step(scenario(experts=8, top_k=2, expert_parallel=8))
    assert "not compared with any measured step" in " ".join(result.cautions)
    assert 0 < result.mfu < 1
    with pytest.raises(FitError, match=r"parallel.context=3"):
        estimate_step(scenario("parallel.context=3"))
    assert "not compared with any measured step" in " ".join(
        estimate_step(scenario("parallel.context=2", "parallel.tensor=4")).cautions
    )
    with pytest.raises(FitError, match="--top-k=9"):
        estimate_step(scenario(experts=8, top_k=9))


def test_a_run_s_bill():
    result = estimate_step(scenario("parallel.tensor=2", "train.micro_batch=1"))
    bill = estimate_run_cost(result, 1e9, share=0.5, price=2.0, watts=1000.0)
    assert bill.gpu_hours == pytest.approx(2 * 8 * result.seconds * 1e9 / (64 * 2048) / 3600)
    assert bill.money == pytest.approx(2 * bill.gpu_hours)
    assert bill.megawatt_hours == pytest.approx(bill.gpu_hours / 1000)
    assert estimate_run_cost(result, 1e9).money is None


@pytest.mark.parametrize("hosts", [32, 256, 1536])
def test_the_quick_share_of_stepping_is_near_the_simulated_one(hosts):
    faults = replace(FaultRates(), spares=10_000)
    outcome = simulate_run(5 * 86400.0, hosts, faults, compute_young_daly_interval(faults, hosts), trials=60)
    assert float(estimate_first_order_share(faults, hosts)) == pytest.approx(
        float(np.mean(outcome.effective)), abs=0.02
    )


def test_no_model_is_harmed_by_the_new_axes():
    """Dense cases price as they did without them."""
    single = case(model=GPT_175B)
    spelled = replace(single, context=1, experts=1, top_k=1, expert_parallel=1)
    assert float(compute_step_parts(load_cluster("a100-roce"), single).total) == float(
        compute_step_parts(load_cluster("a100-roce"), spelled).total
    )


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        (("model.preset=gpt-1.3b", "train.micro_batch=8", "train.global_batch=64"), 1.475),
        (("model.preset=llama-8b", "model.layers=12", "train.micro_batch=1", "train.global_batch=8"), 1.754),
    ],
)
def test_float8_steps_follow_from_its_kernels(settings, measured):
    """Steps on one H200 that nothing of float8 was fitted to: casts and held rates are kernel benchmarks."""
    config = configuration.load(None, list(settings) + ["train.precision=bfloat16", "train.linear_precision=float8"])
    engine = load_calibration("h200-engine", H200.name)
    step = estimate_step(Scenario(config, 1, H200, engine, make_engine_software(config, MEGASCALE_H200))).seconds
    assert step == pytest.approx(measured, rel=0.03)


def test_float8_gemms_hold_their_own_share_of_their_peak():
    stored, never = (float(gemm_seconds(H200, 8192, 8448, 8192, cap=cap, float8=True)) for cap in (0.685, 1.0))
    work = 2.0 * 8192 * 8448 * 8192
    assert work / stored / 1e12 == pytest.approx(0.627 * 1978.9, rel=0.01)
    assert never < stored
