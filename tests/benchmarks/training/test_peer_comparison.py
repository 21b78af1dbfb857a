"""`python -m benchmarks peers`: who can train what, the same job for all, one count of FLOPs; no GPU, no comparison."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from benchmarks.training import peer_choice, peer_comparison, peer_job, peer_megatron, peer_results, peer_torchtitan
from benchmarks.training.peer_shape import make_shape_job
from benchmarks.training.shape_file import PeerRun, Shape
from megascale.bench.step_monitor import StepMonitor
from megascale.config import load_command_line
from megascale.core.flops import mfu
from megascale.errors import ConfigError, TrainingError
from megascale.train.host_pauses import GarbageCollector


def config(preset: str, *arguments: str):
    return load_command_line(
        None, [f"--model.preset={preset}", "--train.precision=bfloat16", "--model.vocab_size=64000"] + list(arguments)
    )


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(peer_choice.importlib.util, "find_spec", lambda name: object())


def test_peers_that_are_not_installed_are_left_out_or_refused(monkeypatch):
    monkeypatch.setattr(peer_choice.importlib.util, "find_spec", lambda name: None)
    chosen, left_out = peer_choice.choose_peers([], config("llama-8b"))
    assert chosen == []
    assert set(left_out) == set(peer_choice.PEERS)
    assert all("not installed" in why for why in left_out.values())
    with pytest.raises(ConfigError, match=r"--peer=torchtitan: .*not installed"):
        peer_choice.choose_peers(["torchtitan"], config("llama-8b"))
    with pytest.raises(ConfigError, match="--peer=nobody"):
        peer_choice.choose_peers(["nobody"], config("llama-8b"))


@pytest.mark.parametrize(
    ("preset", "arguments", "able"),
    [
        ("llama-8b", (), ["torchtitan", "megatron-core"]),
        ("gpt-13b", (), ["megatron-core"]),
        ("gpt-13b", ("--model.block=parallel",), []),
        ("llama-8b", ("--model.window=1024",), []),
        ("llama-8b", ("--optimizer.name=lamb",), []),
        ("llama-8b", ("--model.mlp_bias=true",), []),
    ],
)
def test_a_peer_is_run_only_where_it_trains_the_same(installed, preset, arguments, able):
    chosen, left_out = peer_choice.choose_peers([], config(preset, *arguments))
    assert chosen == able
    assert set(left_out) == set(peer_choice.PEERS) - set(able)


def test_peers_run_in_float8_where_ours_does(installed, tmp_path):
    plain, float8 = config("llama-8b"), config("llama-8b", "--train.linear_precision=float8")
    assert [peer_choice.choose_recipe(name, plain, "auto") for name in peer_choice.PEERS] == ["", ""]
    result = {name: peer_choice.choose_recipe(name, float8, "auto") for name in peer_choice.PEERS}
    assert result == {"torchtitan": "tensorwise", "megatron-core": "delayed"}
    assert peer_choice.choose_peers([], float8, "rowwise")[0] == ["torchtitan"]
    assert peer_choice.choose_peers([], plain, "delayed")[0] == ["megatron-core"]
    with pytest.raises(
        ConfigError, match="--peer=torchtitan: it has no float8 recipe delayed, but tensorwise, rowwise"
    ):
        peer_choice.choose_peers(["torchtitan"], float8, "delayed")
    with pytest.raises(
        ConfigError, match="--peer-float8=blockwise: there are auto, delayed, none, rowwise, tensorwise"
    ):
        peer_choice.choose_peers([], float8, "blockwise")
    job = peer_job.make_job(float8, 2, 10, 5, tmp_path / "a.json")
    arguments = peer_torchtitan._arguments(replace(job, float8="tensorwise"))
    # Their trainer refuses a named recipe where parameters are gathered in float8; without a name it is tensor-wise.
    assert not any("recipe_name" in word for word in arguments)
    assert "--quantize.linear.float8.recipe_name=rowwise" in peer_torchtitan._arguments(replace(job, float8="rowwise"))
    assert "--quantize.linear.float8.filter_fqns=output" in arguments
    assert "--quantize.linear.float8.enable_fsdp_float8_all_gather" in arguments
    assert not any("float8" in word for word in peer_torchtitan._arguments(job))


def test_megatron_adds_weight_gradients_inside_gemms_where_it_can(monkeypatch):
    """Without apex the logits' layer alone gets what apex's kernel does."""
    present: set[str] = set()
    monkeypatch.setattr(peer_megatron.importlib.util, "find_spec", lambda name: name if name in present else None)
    peer_megatron.fuse_gradients()
    assert peer_megatron._FUSED not in sys.modules
    present.add("transformer_engine")
    monkeypatch.delitem(sys.modules, peer_megatron._FUSED, raising=False)
    peer_megatron.fuse_gradients()
    built = sys.modules.pop(peer_megatron._FUSED)
    total = torch.ones(3, 2)
    into = torch.randn(5, 2)
    gradient = torch.randn(5, 3)
    built.wgrad_gemm_accum_fp32(into, gradient, total)
    torch.testing.assert_close(total, 1 + gradient.T @ into)


def test_float8_of_a_peer_needs_its_package(monkeypatch):
    present = lambda name: None if name in ("torchao", "transformer_engine") else object()
    monkeypatch.setattr(peer_choice.importlib.util, "find_spec", present)
    assert peer_choice.choose_peers([], config("llama-8b"))[0] == ["torchtitan", "megatron-core"]
    chosen, left_out = peer_choice.choose_peers([], config("llama-8b", "--train.linear_precision=float8"))
    assert chosen == []
    assert "torchao" in left_out["torchtitan"]
    assert "transformer_engine" in left_out["megatron-core"]


def test_all_get_the_same_job(tmp_path):
    ours = config("llama-8b", "--parallel.tensor=2", "--train.micro_batch=2", "--train.global_batch=16")
    job = peer_job.make_job(ours, 8, 10, 5, tmp_path / "a.json", None)
    assert (job.model["ffn"], job.model["kv_heads"], job.model["vocab"]) == (14336, 8, ours.model.padded_vocab)
    assert (job.tensor, job.world, job.micro_batch, job.global_batch) == (2, 8, 2, 16)
    assert peer_job.make_job(ours, 8, 10, 5, tmp_path / "a.json", 4).micro_batch == 4
    repeated = peer_job.PeerJob(**json.loads(json.dumps(asdict(job))))
    rows = repeated.draw_tokens(1, torch.device("cpu"))
    assert rows.shape == (8193, 2)
    assert torch.equal(rows, job.draw_tokens(1, torch.device("cpu")))
    assert not torch.equal(rows, job.draw_tokens(0, torch.device("cpu")))
    assert int(rows.max()) < job.model["vocab"]


def test_figures_take_the_median_turn_and_one_count_of_flops():
    ours = config("gpt-13b", "--train.global_batch=64")

    def turn(name: str, *seconds: float) -> peer_results.PeerResult:
        return peer_results.PeerResult(name, 0, list(seconds), 50.0, {}, "")

    results = [turn("megascale", 2.0), turn("megatron-core", 2.4, 9.0, 2.4), turn("megatron-core", 2.6)]
    first, second = peer_results.summarize(ours, 8, 989.4, results)
    assert (first["name"], first["seconds"], first["spread"]) == ("megascale", 2.0, 0.0)
    assert second["seconds"] == pytest.approx(2.5)
    assert second["spread"] == pytest.approx(0.08)
    assert first["mfu"] == pytest.approx(mfu(ours.model, 64 * 2048 / 2.0, 8, 989.4))
    assert first["mfu"] / second["mfu"] == pytest.approx(2.5 / 2.0)


@pytest.mark.parametrize("has_ours", [True, False])
def test_peers_are_shown_with_and_without_ours(has_ours, capsys):
    """--peers-only trains no steps of ours, so there is no ratio."""
    results = [peer_results.PeerResult("torchtitan", 0, [3.0], 50.0, {}, "run pip install -e '.[flash4]'")]
    if has_ours:
        results.insert(0, peer_results.PeerResult("megascale", 0, [2.0], 50.0, {}, ""))
    record = {"device": "H100", "processes": 4, "preset": "llama-8b", "date": "2026-11-27", "left_out": {}}
    peer_results.print_results(record, config("llama-8b", "--train.global_batch=16"), results)
    output = capsys.readouterr().out
    assert "3.0000" in output
    assert "pip install -e '.[flash4]'" in output  # not markup
    assert ("1.500x" in output) == has_ours


def test_peers_only_needs_a_peer():
    chosen = ["torchtitan"]
    assert peer_choice.list_contestants(chosen, {}, peers_only=True) == chosen
    assert peer_choice.list_contestants(chosen, {}, peers_only=False) == [peer_choice.OURS, *chosen]
    assert peer_choice.list_contestants([], {}, peers_only=False) == [peer_choice.OURS]
    with pytest.raises(ConfigError, match=r"--peers-only: no peer .*torchtitan: not installed.*omit --peers-only"):
        peer_choice.list_contestants([], {"torchtitan": "not installed"}, peers_only=True)


def test_peers_only_is_refused_with_a_file_of_shapes(benchmarks):
    result = benchmarks("peers", "shapes.toml", "--peers-only")
    assert result.returncode == 2
    assert "--peers-only: with a file of shapes" in result.stderr


def test_without_a_gpu_there_is_nothing_to_compare(benchmarks, tmp_path):
    result = benchmarks("peers", "llama-8b", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 2
    assert "GPU" in result.stderr


def test_a_peer_that_hangs_is_given_up_with_what_it_said():
    code = "import time; print('building the model', flush=True); time.sleep(1000)"
    with pytest.raises(TrainingError, match="megatron-core had not ended after 2 s:\n  building the model"):
        peer_comparison.run_process([sys.executable, "-c", code], "megatron-core", 2)


def test_context_parallelism_is_megatron_s_with_its_engine_only(tmp_path, monkeypatch):
    """Each rank gets an early and a late slice of every sequence."""
    ours = config("llama-8b", "--parallel.context=4")
    job = peer_job.make_job(ours, 4, 10, 5, tmp_path / "a.json")
    assert (job.context, job.context_exchange) == (4, "a2a")
    present = {"torchtitan", "megatron.core", "transformer_engine"}
    monkeypatch.setattr(peer_choice.importlib.util, "find_spec", lambda name: name if name in present else None)
    assert peer_choice.choose_peers([], ours)[0] == ["megatron-core"]
    present.remove("transformer_engine")
    assert "transformer_engine" in peer_choice.choose_peers([], ours)[1]["megatron-core"]
    tokens = torch.arange(16).reshape(1, 16)
    assert peer_megatron.select_slices(tokens, 1, 4).tolist() == [[2, 3, 12, 13]]


class Router(torch.nn.Module):
    """A router of which the routing map is given, bool [tokens, experts]."""

    def __init__(self, routing_map: list[list[int]]) -> None:
        super().__init__()
        self.routing_map = torch.tensor(routing_map, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing_map.float(), self.routing_map


def test_the_load_of_a_rank_is_counted_in_one_more_step():
    """The first of two ranks has three of four choices in the second layer, in each of two micro-batches."""
    even = Router([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    uneven = Router([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    chunk = torch.nn.ModuleList([even, uneven])
    x = torch.zeros(4, 2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        load = peer_megatron.measure_rank_load(
            [chunk], lambda: [router(x) for _ in range(2) for router in chunk], ranks=2, router_type=Router
        )
    finally:
        torch.distributed.destroy_process_group()
    assert load == 1.5
    assert not even._forward_hooks


def test_a_replayed_step_has_no_load():
    """A CUDA graph calls no routers. The other figures of the shape stay."""
    chunk = torch.nn.ModuleList([Router([[1, 0], [0, 1]])])
    assert peer_megatron.measure_rank_load([chunk], lambda: None, ranks=2, router_type=Router) is None


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_load_is_measured_in_due_steps_of_the_warm_up(has_graphs, capsys):
    """Each step takes 4 s, so that each third one is due after 10 s, and the last one of the warm-up always is."""
    now = [0.0]
    calls = []

    def take_step(name, result):
        now[0] += 4.0
        calls.append(name)
        return result

    timed = peer_job.PreparedPeer(
        partial(take_step, "step", 0.5), {}, "", measure_load=partial(take_step, "load", 1.25)
    )
    shape = Shape(name="a", arguments=["gpt-13b"], steps=3, warmup=5)
    peer = PeerRun(settings={"cuda_graph_impl": "local"} if has_graphs else {})
    job = make_shape_job(shape, peer, shape.load_config(), world=1)
    monitor = StepMonitor("a", warmup=5, steps=3, prints=True, clock=lambda: now[0])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        seconds, losses = peer_job.time_steps(timed, job, torch.device("cpu"), monitor)
    finally:
        torch.distributed.destroy_process_group()
    assert len(seconds) == 3
    if has_graphs:
        assert calls == ["step"] * 8
        return
    assert calls == ["step"] * 3 + ["load"] * 2 + ["step"] * 3
    assert losses == [0.5] * 6
    assert capsys.readouterr().out.splitlines() == [
        "a: warm-up step 1 of 5, 4.0000 s per step",
        "a: warm-up step 4 of 5, 4.0000 s per step, load of the slowest rank 1.25",
        "a: timed step 2 of 3, 4.0000 s per step, load of the slowest rank 1.25 in step 5",
    ]


def test_a_peer_trains_a_shape_with_its_own_settings():
    arguments = ["gpt-13b", "--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.virtual_stages=5"]
    arguments += ["--model.layers=20", "--train.micro_batch=4", "--train.global_batch=32"]
    shape = Shape(name="a", arguments=arguments, steps=3, warmup=2)
    ours = shape.load_config()
    peer = PeerRun(micro_batch=2, virtual_stages=2, recompute="full", settings={"cuda_graph_impl": "local"})
    job = make_shape_job(shape, peer, ours, world=4)
    assert (job.steps, job.warmup, job.micro_batch, job.virtual) == (3, 2, 2, 2)
    assert (job.tensor, job.pipeline, job.global_batch, job.recompute) == (2, 2, 32, "full")
    assert job.settings == {"cuda_graph_impl": "local"}
    assert make_shape_job(shape, PeerRun(), ours, world=4).virtual == 5
    experts = Shape(name="b", arguments=["mixtral-8x7b", "--parallel.expert=4", "--parallel.experts_over=data"])
    job = make_shape_job(experts, PeerRun(), experts.load_config(), world=4)
    assert (job.experts["number"], job.experts["ranks"], job.experts["even"]) == (8, 4, False)


def test_the_attention_of_a_peer_is_its_enumeration(monkeypatch):
    enums = pytest.importorskip("megatron.core.transformer.enums")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")  # left by an earlier model; Megatron refuses another value
    shape = Shape(name="a", arguments=["gpt-13b"])
    peer = PeerRun(settings={"attention_backend": "flash"})
    job = make_shape_job(shape, peer, shape.load_config(), world=1)
    assert peer_megatron.read_settings(job) == {"attention_backend": enums.AttnBackend.flash}
    assert "NVTE_FUSED_ATTN" not in os.environ


class Hooked(torch.nn.Module):
    """A module that the autograd graph of its last output holds, as Megatron-Core's dispatchers of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.accumulate = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        self.accumulate.register_hook(lambda *_: self.training)
        self.last_output = 2 * self.weight


def test_a_job_leaves_no_model_behind():
    """Python's garbage collector does not find a cycle through the autograd graph."""
    module = Hooked()
    reference = weakref.ref(module)
    collector = GarbageCollector(0)
    peer_megatron.free_job([module], collector)
    del module
    gc.collect()
    assert reference() is None
