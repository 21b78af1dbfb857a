"""FLOPs, bytes and rates against hand counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale.config import ModelConfig
from megascale.core import flops, part_inventories
from megascale.simulate.calibration import Constants
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.kernel_times import (
    ALIGNMENT,
    FUSED_LOSS_BYTES,
    LOSS_BYTES,
    alignment_efficiency,
    attention_rate,
    gemm_seconds,
    layer_times,
    logits_seconds,
    padding_factor,
    wave_efficiency,
)
from megascale.simulate.network import RingNetwork
from megascale.simulate.software import (
    MEGASCALE,
    MEGASCALE_H200,
    MEGASCALE_H200_GRAPHS,
    MEGATRON_2023,
    MEGATRON_CORE_H200,
    MEGATRON_DEEPSPEED,
    find_stack,
)
from megascale.simulate.stage_times import compute_gemm_cap, exposed_launches
from tests.simulate.simulator_cases import GPT_13B, GPT_175B, case, with_part


@pytest.mark.parametrize("model", [GPT_13B, GPT_175B, ModelConfig(activation="swiglu", kv_heads=2, vocab_size=1000)])
def test_flops_are_the_one_count(model):
    """Without a window the case counts what megascale.core.flops counts."""
    single = case(1, 1, 1, 1, 1, 8, MEGATRON_2023, model)
    expected = flops.flops_per_token(model).training * model.sequence_length * 8
    assert float(single.flops) == pytest.approx(expected, rel=1e-12)


def test_windowed_flops_are_the_one_count():
    model = GPT_175B.model_copy(update={"window": MEGASCALE.window})
    expected = flops.flops_per_token(model).training * 2048 * 256
    assert float(case(data=4, batch=256).flops) == pytest.approx(expected, rel=1e-12)


def test_waves():
    """108 processors, tiles of 256 x 128: 108 tiles are one whole wave, one more is a second."""
    assert wave_efficiency(256 * 9, 128 * 12, 108) == pytest.approx(1.0)
    assert wave_efficiency(256 * 109, 128, 108) < 0.95
    assert wave_efficiency(1, 1, 108) < 1e-3
    rows = np.arange(1, 4000, 37)
    assert np.all(wave_efficiency(rows, 4096, 132) <= 1.0 + 1e-12)


def test_a_large_gemm_runs_no_faster_than_any_that_was_measured():
    cluster = load_cluster("a100-roce")
    seconds = float(gemm_seconds(cluster, 8192, 9 * 12 * 128, 8192))
    assert 2 * 8192**2 * 9 * 12 * 128 / seconds == pytest.approx(312e12 * cluster.kernels.gemm_best, rel=1e-9)


def test_power_leaves_more_where_gemms_pause():
    """Alone they hold the sustained rate; waits of a micro-batch raise it, and a GPU without a figure has no limit."""
    cluster = load_cluster("h200-host")
    net = RingNetwork(cluster)
    alone, pausing = case(1, 1, 1, 1, 4, 4, model=GPT_13B), case(2, 1, 1, 1, 1, 4, MEGATRON_2023, GPT_13B)
    sustained = cluster.power.gemm_sustained
    assert float(compute_gemm_cap(cluster, alone, Constants(), net)) == pytest.approx(sustained)
    assert sustained < float(compute_gemm_cap(cluster, pausing, Constants(), net)) < cluster.kernels.gemm_best
    unmeasured = cluster.model_copy(update={"power": None})
    assert compute_gemm_cap(unmeasured, alone, Constants(), net) == 1.0
    assert float(compute_step_parts(unmeasured, alone).total) < float(compute_step_parts(cluster, alone).total)


def test_a_host_s_launches_are_the_host_s():
    """A narrow model in TP2 is bound by launches: by a slow host's more, and by no more than what was measured."""
    narrow = ModelConfig(layers=12, hidden=1024, heads=16, vocab_size=50304, sequence_length=1024)
    rented, dgx = load_cluster("h100-host"), load_cluster("h100-dgx")

    def seconds(cluster, tensor, software=MEGATRON_CORE_H200):
        return float(compute_step_parts(cluster, case(tensor, 1, 1, 1, 1, 8, software, narrow)).total)

    # 7.3 ms for a layer in TP2 were measured on rented hosts (dev/log.md).
    assert seconds(rented, 2) / (8 * 12) == pytest.approx(7.3e-3, rel=0.1)
    assert seconds(dgx, 2) < 0.55 * seconds(rented, 2)
    assert 1.5 < seconds(rented, 2) / seconds(rented, 1) < 3.5
    float8 = replace(MEGATRON_CORE_H200, float8=True)
    assert 1.2 < seconds(rented, 2, float8) / seconds(rented, 2) < 1.3
    # Replayed launches cost next to nothing.
    assert seconds(rented, 2, MEGASCALE_H200_GRAPHS) < 0.3 * seconds(rented, 2, MEGASCALE_H200)


def test_launches_and_kernels_delay_each_other_where_they_are_alike():
    assert exposed_launches(0.0, 1.0) == 0.0
    assert exposed_launches(3.0, 1.0) == pytest.approx(2.0, abs=1e-5)
    assert 0.02 < exposed_launches(1.0, 1.0) < 0.1


def test_what_tensor_parallel_groups_gather_in_float8_has_half_the_bytes():
    cluster = load_cluster("h200-host")
    plain, fast = (
        compute_step_parts(
            cluster, case(2, 1, 1, 1, 4, 16, replace(find_stack("megatron-core-h200"), float8=on), GPT_13B)
        )
        for on in (False, True)
    )
    assert 0.6 < float(fast.tensor / plain.tensor) < 0.9
    ours = replace(find_stack("megascale-h200"), float8=True, parallel_block=False)
    agreeing, without = (
        compute_step_parts(cluster, case(2, 1, 1, 1, 1, 16, replace(ours, float8_agrees=on), GPT_13B))
        for on in (True, False)
    )
    # Eight numbers per layer and micro-batch, 16 us each.
    assert float(agreeing.tensor - without.tensor) == pytest.approx(16 * 40 * 8 * 16e-6, rel=0.05)


def test_widths_that_do_not_feed_tensor_cores_cost_more():
    """Padding 50,257 to 50,304 columns saves almost half of the logits' GEMM; wide multiples of 8 are all alike."""
    cluster = load_cluster("a100-hdr")
    odd, padded = (float(gemm_seconds(cluster, 8192, columns, 768)) for columns in (50257, 50304))
    assert padded < 0.6 * odd
    assert alignment_efficiency(6144, 4096) == alignment_efficiency(50304, 768) == 1.0
    large = alignment_efficiency(np.array([5, 6, 12, 24]), 4096)
    assert list(large) == list(ALIGNMENT.values())
    thin = [float(gemm_seconds(cluster, 8192, 4096, depth)) / depth for depth in (999, 1000)]
    assert thin[0] > 1.3 * thin[1]


def test_a_thin_gemm_runs_at_memory_speed():
    cluster = load_cluster("a100-roce")
    seconds = float(gemm_seconds(cluster, 16, 16384, 16384))
    assert seconds >= 2.0 * 16384 * 16384 / (2039e9 * 0.86)


def test_gemms_run_as_measured_on_an_h200():
    """TFLOP/s of 8,192 x 8,448 x K in bursts, 2026-11-24: within 8%, also the shallow ones of narrow models."""
    cluster = load_cluster("h200-host")
    for depth, measured in ((384, 506), (768, 645), (1536, 750), (2048, 769), (4096, 803), (8192, 828)):
        seconds = float(gemm_seconds(cluster, 8192, 8448, depth))
        assert 2 * 8192 * 8448 * depth / seconds == pytest.approx(measured * 1e12, rel=0.08)


def test_batched_gemms_run_as_measured_on_an_h200():
    """Products of unfused attention, 32 matrices of scores of 2,048 x 2,048, 2026-11-24: within 12%, not one by one."""
    cluster = load_cluster("h200-host")
    for size, wide, deep in ((64, 179, 208), (96, 258, 301), (128, 341, 389)):
        flops = 2 * 32 * 2048**2 * size
        assert flops / gemm_seconds(cluster, 2048, 2048, size, batch=32) == pytest.approx(wide * 1e12, rel=0.12)
        assert flops / gemm_seconds(cluster, 2048, size, 2048, batch=32) == pytest.approx(deep * 1e12, rel=0.12)
        one_by_one = 32 * gemm_seconds(cluster, 2048, size, 2048)
        assert gemm_seconds(cluster, 2048, size, 2048, batch=32) < 0.7 * one_by_one


def test_attention_of_narrow_heads_waits_for_exponentials():
    """cuDNN on an H200 at 2,048, 2026-11-24: 416 TFLOP/s at a head dimension of 128, 332 at 64."""
    cluster = load_cluster("h200-host")
    model = GPT_13B.model_copy(update={"heads": 80})
    single = {"tensor": 1, "pipeline": 1, "virtual": 1, "data": 1, "micro": 4, "batch": 4}
    plain = replace(MEGASCALE_H200, parallel_block=False, window=None)
    seconds = [layer_times(cluster, case(**single, software=plain, model=m)) for m in (GPT_13B, model)]
    ratio = [float(t.attention_forward + t.attention_backward) for t in seconds]
    assert ratio[0] / ratio[1] == pytest.approx(332 / 416, rel=0.06)


def test_softmax_without_its_kernel_costs_more():
    """Megatron-LM's kernel wants a multiple of four matrices of scores; 18.4B in TP16 has three a sequence."""
    cluster = load_cluster("a100-hdr")
    model = ModelConfig(layers=40, hidden=6144, heads=48, vocab_size=51200, sequence_length=2048)
    layout = {"tensor": 16, "pipeline": 1, "virtual": 1, "data": 4}
    two, four = (
        layer_times(cluster, case(**layout, micro=m, batch=16, software=MEGATRON_DEEPSPEED, model=model))
        for m in (2, 4)
    )
    assert float(two.attention_forward) > 1.2 * float(four.attention_forward)


def test_older_stacks_wait_for_what_newer_ones_hide():
    """Megatron-DeepSpeed's backward all-reduce and autograd's addition of weight gradients."""
    cluster = load_cluster("a100-hdr")
    layout = {"tensor": 8, "pipeline": 1, "virtual": 1, "data": 8, "micro": 2, "batch": 128}
    old, hidden, added = (
        compute_step_parts(cluster, case(**layout, software=replace(MEGATRON_DEEPSPEED, **change), model=GPT_13B))
        for change in ({}, {"tp_backward_overlap": True}, {"fused_accumulation": True})
    )
    # Two all-reduces of six; 15% of a hidden one remains.
    assert float(hidden.tensor / old.tensor) == pytest.approx((2 + 2 * 0.15) / 4, rel=1e-6)
    assert float(added.gemm) < 0.99 * float(old.gemm)


def test_accumulating_costs_memory_traffic():
    cluster = load_cluster("a100-roce")
    plain, added = (float(gemm_seconds(cluster, 12288, 6144, 2048, a)) for a in (None, 4))
    traffic = cluster.kernels.accumulate_exposed * 8.0 * 12288 * 6144 / (2039e9 * 0.86)
    assert added - plain == pytest.approx(traffic, rel=1e-9)


def test_attention_rates_interpolate_and_pad():
    cluster = load_cluster("h200-host")
    assert float(attention_rate(cluster, "cudnn", 2048)) == pytest.approx(391e12)
    assert 391e12 < float(attention_rate(cluster, "cudnn", 4096)) < 545e12
    assert float(padding_factor("flash1", 96)) == pytest.approx(128 / 96)
    assert float(padding_factor("flash2", 96)) == 1.0


def test_windows_cost_what_was_measured():
    """FlashAttention-2 windows on the H200 host, 20 heads x 4 at 2,048 and 32 heads at 8,192: within 12%."""
    cluster = load_cluster("h200-host")
    for sequence, window, ratio in (
        (2048, 1024, 1.060 / 1.374),
        (8192, 1024, 2.096 / 6.830),
        (8192, 4096, 5.287 / 6.893),
    ):
        share = part_inventories.window_area_fraction(sequence, window)
        full, part = (float(attention_rate(cluster, "flash2", s)) for s in (sequence, sequence * share))
        assert share * full / part == pytest.approx(ratio, rel=0.12)


def test_techniques_shorten_a_layer():
    cluster = load_cluster("a100-roce")
    before, after = (layer_times(cluster, case(software=s)) for s in (MEGATRON_2023, MEGASCALE))
    assert float(after.forward + after.backward) < float(before.forward + before.backward)
    assert float(after.attention_forward) < 0.5 * float(before.attention_forward)


def test_logits_of_175b_are_a_few_percent_of_a_stage():
    """The research note's 3.1 ms at peak against 107 ms of products a stage."""
    cluster = load_cluster("a100-roce")
    forward, backward = logits_seconds(cluster, case())
    stage = 12 * (layer_times(cluster, case()).gemm_forward + layer_times(cluster, case()).gemm_backward)
    assert 0.025 < float((forward + backward) / stage) < 0.05


def test_a_fused_loss_reads_the_logits_once():
    """gpt2-124m: the eager loss of 16,384 tokens takes longer than the GEMMs that make its logits."""
    cluster = load_cluster("h200-host")
    model = ModelConfig(layers=12, hidden=768, heads=12, vocab_size=50304, sequence_length=1024)
    single = {"tensor": 1, "pipeline": 1, "virtual": 1, "data": 1, "micro": 4, "batch": 16, "model": model}
    fused, eager = (
        sum(float(x) for x in logits_seconds(cluster, case(**single, software=replace(MEGASCALE_H200, fused_loss=f))))
        for f in (True, False)
    )
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    assert eager - fused == pytest.approx((LOSS_BYTES - FUSED_LOSS_BYTES) * 4096 * 50304 / bandwidth, rel=1e-6)
    assert eager > 2 * fused


def test_ring_collectives():
    cluster = load_cluster("a100-roce")
    net = RingNetwork(cluster)
    assert float(net.collective(1e9, 1, 1)) == 0.0
    inside = float(net.collective(1e9, 8, 8))
    assert inside == pytest.approx(1e9 * 7 / 8 / 233e9 + (19 + 7 * 4) * 1e-6)
    # Four ranks, one a host: each ring passes one NIC.
    separate = float(net.collective(1e9, 4, 1))
    assert separate == pytest.approx(1e9 * 3 / 4 / 20e9 + (20 + 3 * 6) * 1e-6)
    # Sixteen ranks on two hosts share eight NICs; one of a ring's fifteen hops leaves a host.
    pair = float(net.collective(1e9, 16, 8))
    assert pair == pytest.approx(1e9 * 15 / 16 / 160e9 + (20 + 14 * 4 + 6) * 1e-6)
    assert float(RingNetwork(cluster, 0.4).collective(1e9, 4, 1)) > separate


def test_all_reduces_on_one_host_take_what_was_measured():
    """vTrain's tables for A100 (trace/a100 of its repository): 67 and 268 MB over 2, 4 and 8 GPUs, in microseconds."""
    net = RingNetwork(load_cluster("a100-hdr"))
    for ranks, small, large in ((2, 404.7, 1455.8), (4, 543.8, 1929.0), (8, 579.9, 2162.3)):
        for size, measured in ((67108864, small), (268435456, large)):
            assert 2e6 * float(net.collective(size, ranks, ranks)) == pytest.approx(measured, rel=0.06)


def test_a_gemm_s_launch_costs_what_its_library_adds():
    cluster = load_cluster("h200-host")
    assert cluster.kernels.gemm_gap_us == 2.7
    none = with_part(cluster, "kernels", gemm_gap_us=None)
    more = float(gemm_seconds(cluster, 128, 128, 128)) - float(gemm_seconds(none, 128, 128, 128))
    assert more == pytest.approx(2.7e-6)
