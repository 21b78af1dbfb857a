"""Float8's plain references: scales, casts and GEMMs on the CPU, and what is refused before anything runs."""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale import torch_private
from megascale.errors import ConfigError, FitError, TrainingError
from megascale.ops import dispatch
from megascale.ops.float8 import cublaslt, gemm
from megascale.ops.float8.cast import cast_by_amax, cast_rows, compute_amax, transpose_scaled_rows
from megascale.ops.float8.formats import (
    E4M3,
    E5M2,
    SMALLEST_SCALE,
    Float8,
    allocate_scales,
    amax_reference,
    dequantise,
    power_of_2_above,
    quantise_reference,
    scale_from_amax,
)

kinds = st.sampled_from([E4M3, E5M2])
SETTINGS = settings(max_examples=60, deadline=None)
magnitudes = st.floats(2.0**-100, 2.0**100, width=32)
nothing_to_learn = st.sampled_from([0.0, math.inf, math.nan])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@SETTINGS
@given(magnitudes, kinds, st.booleans())
def test_amax_falls_on_the_largest_number(amax, kind, power_of_2):
    scale = scale_from_amax(torch.tensor(amax), kind, power_of_2=power_of_2)
    at = amax / scale.item() / kind.largest
    if power_of_2:
        assert 0.5 - 1e-6 < at < 1 + 1e-6
        assert math.frexp(scale.item())[0] == 0.5
    else:
        assert at == pytest.approx(1.0)


@SETTINGS
@given(st.lists(st.one_of(magnitudes, nothing_to_learn), min_size=1, max_size=6), kinds, magnitudes, st.booleans())
def test_an_amax_that_says_nothing_has_the_given_scale(amaxes, kind, old, power_of_2):
    scales = scale_from_amax(torch.tensor(amaxes), kind, old, power_of_2=power_of_2)
    for amax, scale in zip(amaxes, scales.tolist(), strict=True):
        if amax == 0 or not math.isfinite(amax):
            assert scale == torch.tensor(old).item()
        else:
            assert scale >= SMALLEST_SCALE
            assert math.isfinite(1 / scale)


def test_scales_at_the_ends_of_float32():
    tiny, huge = torch.tensor(1e-45), torch.tensor(torch.finfo(torch.float32).max)
    assert scale_from_amax(tiny, E5M2).item() == SMALLEST_SCALE
    assert scale_from_amax(huge, E4M3).isfinite()
    assert power_of_2_above(torch.tensor([1.0, 1.5, 2.0, 2.0000002])).tolist() == [1.0, 2.0, 2.0, 4.0]


@SETTINGS
@given(st.integers(0, 2**16), kinds, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), magnitudes)
def test_a_cast_there_and_back_is_off_by_half_a_step(seed, kind, dtype, size):
    """Relative to the number where it is normal in the format, to the smallest normal number below."""
    x = randn(16, 16, seed=seed, dtype=dtype) * size
    scale = scale_from_amax(amax_reference(x), kind)
    back = dequantise(quantise_reference(x, scale, kind), scale, torch.float64)
    digits, smallest_normal = (3, 2.0**-6) if kind is E4M3 else (2, 2.0**-14)
    step = x.double().abs().clamp_min(smallest_normal * scale.item()) * 2.0**-digits
    assert ((back - x.double()).abs() <= step * (0.5 + 1e-5)).all()


@SETTINGS
@given(kinds, st.floats(-(2.0**99), 2.0**99, width=32), magnitudes)
def test_what_is_too_large_is_clamped_and_counted_and_what_is_not_finite_remains_so(kind, value, scale):
    x = torch.tensor([value, math.inf, -math.inf, math.nan, 0.0])
    counts = torch.zeros(2, dtype=torch.int64)
    q = quantise_reference(x, torch.tensor(scale), kind, counts)
    scaled = (x[0] * (1 / torch.tensor(scale))).item()
    assert q[1:4].float().isnan().all()
    assert q[4].float() == 0
    if abs(scaled) > kind.largest:
        assert q[0].float().item() == math.copysign(kind.largest, value)
    assert counts[0] == (abs(scaled) > kind.clipped)
    assert counts[1] == (value != 0 and q[0].float() == 0)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_flushed_is_exactly_what_becomes_zero(kind):
    edge = torch.tensor([kind.flushed, kind.flushed * (1 + 2**-20), -kind.flushed, 0.0])
    counts = torch.zeros(2, dtype=torch.int64)
    assert (quantise_reference(edge, torch.tensor(1.0), kind, counts).float() == 0).tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert counts.tolist() == [0, 2]


@SETTINGS
@given(st.sampled_from([(1, 1), (5, 3), (2, 3, 7), (0, 4), (16, 16)]), kinds, st.booleans(), st.integers(0, 99))
def test_both_copies_hold_the_same_numbers_with_one_scale(shape, kind, has_amax, seed):
    x = randn(*shape, seed=seed, dtype=torch.bfloat16)
    x_MN = x.reshape(-1, shape[-1])
    amax = compute_amax(x)
    assert amax.item() == (x.abs().max().float().item() if x.numel() else 0)
    built = cast_by_amax(x, kind, amax if has_amax else None)
    assert built.rows.shape == x_MN.shape
    assert torch.equal(built.rows.float(), built.columns.t().float())
    assert built.rows_scale is built.columns_scale
    if not amax:
        assert built.rows_scale == 1.0
    assert compute_amax(x, torch.tensor(0.25)).item() == max(0.25, amax.item())
    only = cast_by_amax(x, kind, columns=False)
    assert torch.equal(only.rows.float(), built.rows.float())
    assert only.columns is None


@SETTINGS
@given(st.sampled_from([(1, 1), (5, 3), (16, 32)]), kinds, st.integers(0, 99))
def test_row_wise_scales_know_nothing_of_other_rows(shape, kind, seed):
    x = randn(*shape, seed=seed)
    built = cast_rows(x, kind, columns=True)
    assert built.rows_scale.shape == (shape[0], 1)
    assert built.columns_scale.shape == (shape[1], 1)
    alone = cast_rows(x[:1], kind)
    assert torch.equal(alone.rows.float(), built.rows[:1].float())
    turned = cast_rows(x.t().contiguous(), kind)
    assert torch.equal(turned.rows.float(), built.columns.float())
    x[0], x[-1, 0] = 0, math.inf if shape[0] > 1 else 0
    built = cast_rows(x, kind)
    assert built.rows_scale[0] == 1
    assert built.rows[0].float().abs().max() == 0
    if shape[0] > 1:
        assert built.rows_scale[-1] == 1
        assert built.rows[-1, 0].float().isnan()


@pytest.mark.parametrize("spread", [0, 4, 12])
def test_a_transpose_of_scaled_rows_is_as_exact_as_a_cast_by_one_scale(spread):
    """Rows differ by powers of two. Rounding twice changes subnormal numbers only, by at most half a step."""
    x = randn(64, 48) * torch.linspace(0, -spread, 64).round().exp2()[:, None]
    x[5] = 0
    by_rows = cast_rows(x, E4M3, empty_scale=2.0**-120)
    columns, scale = transpose_scaled_rows(by_rows.rows, by_rows.rows_scale)
    assert scale == by_rows.rows_scale.max() < 1  # the row of zeros does not determine the scale
    assert columns.shape == (48, 64)
    assert torch.equal(scale_from_amax(compute_amax(x), E4M3, power_of_2=True), scale)
    direct = quantise_reference(x, scale, E4M3).t()
    smallest_normal = 2.0**-6
    difference = (exact(columns, scale) - exact(direct, scale)).abs()
    is_normal = direct.float().abs() >= smallest_normal
    assert difference[is_normal].max() == 0
    assert difference.max() <= 2.0**-9 * scale


def exact(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise(q, scale, torch.float64)


@SETTINGS
@given(st.sampled_from([(16, 32, 48), (3, 5, 7), (1, 16, 16)]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_three_gemms_of_a_linear(sizes, row_wise, unset, seed):
    tokens, inputs, outputs = sizes
    x, w, dy = (randn(*shape, seed=seed) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    if row_wise:
        x8, w8, dy8 = (cast_rows(t, E4M3, columns=True) for t in (x, w, dy))
    else:
        x8 = cast_by_amax(x, E4M3)
        w8 = cast_by_amax(w, E4M3)
        dy8 = cast_by_amax(dy, E5M2)
    bias = randn(outputs, seed=seed)
    y = gemm.matmul(x8.rows, x8.rows_scale, w8.rows, w8.rows_scale, dtype=torch.float32, bias=bias)
    want = exact(x8.rows, x8.rows_scale) @ exact(w8.rows, w8.rows_scale).t() + bias
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    dx = gemm.matmul(dy8.rows, dy8.rows_scale, w8.columns, w8.columns_scale, dtype=torch.float64)
    torch.testing.assert_close(dx, exact(dy8.rows, dy8.rows_scale) @ exact(w8.columns, w8.columns_scale).t())
    main = torch.full((outputs, inputs), math.nan if unset else 2.0)
    gemm.matmul_into(main, dy8.columns, dy8.columns_scale, x8.columns, x8.columns_scale, overwrite=unset)
    want = exact(dy8.columns, dy8.columns_scale) @ exact(x8.columns, x8.columns_scale).t() + (0 if unset else 2)
    torch.testing.assert_close(main.double(), want, rtol=1e-5, atol=1e-5)
    assert dispatch.list_choices()["float8 GEMM"] == "reference (cpu tensors)"


@pytest.mark.parametrize(("kinds", "error"), [((E4M3, E4M3), 0.0375), ((E5M2, E4M3), 0.0585)])
def test_error_of_a_gemm_of_gaussians(kinds, error):
    """3.7% and 5.9% of the norm are the formats' own: an error in a scale or a rounding would be more."""
    a, b = randn(64, 2048), randn(96, 2048, seed=1)
    qa, qb = (cast_by_amax(t, kind) for t, kind in zip((a, b), kinds, strict=True))
    got = gemm.matmul(qa.rows, qa.rows_scale, qb.rows, qb.rows_scale, dtype=torch.float32)
    assert ((got - a @ b.t()).norm() / (a @ b.t()).norm()).item() == pytest.approx(error, rel=0.06)


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "named"), [(8, 16, 16, "8 tokens"), (16, 40, 16, "40 inputs")])
def test_sizes_that_do_not_divide_are_named(tokens, inputs, outputs, named):
    with pytest.raises(FitError, match=f"layers.0.qkv has {named}.*multiples of 16"):
        gemm.check_shape("layers.0.qkv", tokens, inputs, outputs)
    gemm.check_shape("layers.0.qkv", 16, 32, 48)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a device."""

    is_cuda = True


@pytest.mark.parametrize(
    ("capability", "K", "kinds", "error", "message"),
    [
        ((8, 0), 16, (E4M3, E4M3), ConfigError, "A100 has 8.0"),
        ((9, 0), 24, (E4M3, E4M3), FitError, "not a multiple of 16"),
        ((9, 0), 16, (E5M2, E5M2), FitError, "two E5M2"),
    ],
)
def test_a_device_or_a_shape_without_float8_is_an_error_not_another_gemm(capability, K, kinds, error, message):
    single = torch.ones(())
    a, b = (torch.zeros(16, K).to(kind.dtype).as_subclass(OnCuda) for kind in kinds)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_name", return_value="A100"),
    ):
        for call in (
            lambda: gemm.matmul(a, single, b, single),
            lambda: gemm.matmul_into(torch.zeros(16, 16), a, single, b, single),
        ):
            with pytest.raises(error, match=message):
                call()


def test_the_library_of_this_process_is_found_by_its_map(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 08:01 5   /usr/lib/libc.so.6\n7f02-7f03 r--p 0 08:01 6   /a b/libcublasLt.so.13\n"
    )
    assert cublaslt.find_library_path(str(maps)) == "/a b/libcublasLt.so.13"
    maps.write_text("7f00-7f01 rw-p 0 00:00 0\n")
    with pytest.raises(TrainingError, match="needs the cuBLASLt"):
        cublaslt.find_library_path(str(maps))


def test_the_heuristic_result_is_laid_out_as_in_the_header():
    assert ctypes.sizeof(cublaslt._Heuristic) == 96
    assert cublaslt._Heuristic.workspace.offset == 64


class FakeLibrary(cublaslt._Library):
    """cuBLASLt's functions as C would see them: called back through the declared types, with a log of all calls.

    Attributes:
        log: name and arguments of each call. Attributes are followed by their value, GEMMs by beta and the addresses
            of the scales of a and b that the descriptor holds.
        status: result of each GEMM.
    """

    def __init__(self, proposals: int = 8, status: int = 0) -> None:
        self.log: list[tuple] = []
        self.status = status
        self.path = "fake"
        self.version = 130100
        self.handles = {-1: ctypes.c_void_p(7)}  # the index of a CPU tensor's device
        attributes: dict[tuple[int, int], int] = {}

        def back(name, types):
            def call(*arguments):
                extra = ()
                if name.endswith("Create") and len(types) in (3, 5):  # a descriptor or layout: numbered as made
                    ctypes.c_void_p.from_address(arguments[0]).value = 1001 + len(self.log)
                if name == "cublasLtMatmulAlgoGetHeuristic":
                    ctypes.c_int.from_address(arguments[-1]).value = min(proposals, arguments[7])
                if name.endswith("SetAttribute"):
                    value = int.from_bytes(ctypes.string_at(*arguments[2:]), "little")
                    attributes[arguments[0] or 0, arguments[1]] = value
                    extra = (value,)
                if name == "cublasLtMatmul":
                    beta = ctypes.c_float.from_address(arguments[7]).value
                    extra = (beta, attributes[arguments[1], 18], attributes[arguments[1], 17])
                self.log.append((name, *arguments, *extra))
                return self.status if name == "cublasLtMatmul" else 0

            return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)

        self.calls = mock.Mock(spec=[], **{name: back(name, types) for name, types in cublaslt.CALLS.items()})
        self.set_attribute = self.calls.cublasLtMatmulDescSetAttribute

    def get_workspace(self, device, stream, nbytes):
        return 0xBEEF00000000 + stream  # does not fit 32 bits

    def named(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.log if call[0] == name]


@pytest.fixture
def fake(monkeypatch):
    built = FakeLibrary()
    monkeypatch.setattr(cublaslt, "_library", built)
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_refusals", {})
    monkeypatch.setitem(vars(torch_private), "current_raw_stream", lambda device: 5)  # only CUDA builds have it
    return built


def operands(M=32, N=48, K=16, kind=E5M2):
    single = allocate_scales(2)
    return torch.zeros(M, K).to(kind.dtype), single[0], torch.zeros(N, K).to(E4M3.dtype), single[1]


def test_cublaslt_gets_the_transposed_gemm_with_each_scale_at_its_operand(fake):
    a, a_scale, b, b_scale = operands()
    target = torch.zeros(32, 48)
    for unset in (True, False):
        cublaslt.matmul_into(target, a, a_scale, b, b_scale, overwrite=unset)
    layouts = fake.named("cublasLtMatrixLayoutCreate")
    assert [call[1:] for call in layouts] == [(29, 16, 32, 16), (28, 16, 48, 16), (0, 48, 32, 48)]
    (proposal,) = fake.named("cublasLtMatmulAlgoGetHeuristic")
    assert proposal[7] == cublaslt.MAX_PROPOSALS
    first, second = fake.named("cublasLtMatmul")
    assert (first[-3], second[-3]) == (0.0, 1.0)  # beta
    assert (second[3], second[5]) == (b.data_ptr(), a.data_ptr())
    assert second[8] == second[10] == target.data_ptr()
    assert second[13:16] == (0xBEEF00000005, cublaslt.WORKSPACE_BYTES, 5)
    assert second[-2:] == (a_scale.data_ptr(), b_scale.data_ptr())


def test_a_gemm_without_a_proposed_algorithm_is_an_error(monkeypatch, fake):
    monkeypatch.setattr(cublaslt, "_library", FakeLibrary(proposals=0))
    a, a_scale, b, b_scale = operands()
    with pytest.raises(TrainingError, match=r"proposes no algorithm, for \[32, 16\]"):
        cublaslt.matmul_into(torch.zeros(32, 48), a, a_scale, b, b_scale)


def test_a_product_asks_for_the_algorithm_of_torch_once(fake, monkeypatch):
    monkeypatch.setattr(torch_private, "get_cublaslt_workspace_bytes", lambda: 1 << 20)
    a, a_scale, b, b_scale = operands()
    bias = torch.zeros(48, dtype=torch.bfloat16)
    out = torch.zeros(32, 48, dtype=torch.bfloat16)
    assert cublaslt.multiply(out, a, a_scale, b, b_scale, bias=bias, fast=True) == ""
    (proposal,) = fake.named("cublasLtMatmulAlgoGetHeuristic")
    assert proposal[7] == 1
    ((*_, workspace_bytes),) = fake.named("cublasLtMatmulPreferenceSetAttribute")
    assert workspace_bytes == 1 << 20
    attributes = {call[1]: call[-1] for call in fake.named("cublasLtMatmulDescSetAttribute")}
    scales = {17: b_scale.data_ptr(), 18: a_scale.data_ptr()}
    # Transposed A, fast sums, epilogue with bias, address and type of the bias.
    assert attributes == {3: 1, 4: 0, 25: 1, 7: 4, 8: bias.data_ptr(), 26: 14, **scales}

    fake.log.clear()
    assert cublaslt.multiply(out, a, a_scale, b, b_scale, bias=bias, fast=True) == ""
    assert [name for name, *_ in fake.log] == ["cublasLtMatmul"]
    fake.log.clear()
    other_bias = bias.clone()
    assert cublaslt.multiply(out, a, b_scale, b, a_scale, bias=other_bias, fast=True) == ""
    names = [name for name, *_ in fake.log]
    assert names == ["cublasLtMatmulDescSetAttribute"] * 3 + ["cublasLtMatmul"]
    assert fake.log[-1][-2:] == (b_scale.data_ptr(), a_scale.data_ptr())
    assert fake.log[-2][-1] == other_bias.data_ptr()


def test_each_kind_of_product_has_its_own_plan(fake):
    a, a_scale, b, b_scale = operands()
    out = torch.zeros(32, 48, dtype=torch.bfloat16)
    bias = torch.zeros(48, dtype=torch.bfloat16)
    row_scales = torch.ones(32, 1), torch.ones(48, 1)
    calls = (
        lambda: cublaslt.multiply(out, a, a_scale, b, b_scale),
        lambda: cublaslt.multiply(out, a, a_scale, b, b_scale, fast=True),
        lambda: cublaslt.multiply(out, a, a_scale, b, b_scale, bias=bias),
        lambda: cublaslt.multiply(out, a, row_scales[0], b, row_scales[1]),
        lambda: cublaslt.multiply(out, a.to(E4M3.dtype), a_scale, b, b_scale),
        lambda: cublaslt.multiply(torch.zeros(32, 48), a, a_scale, b, b_scale),
        lambda: cublaslt.multiply(out[:16], a[:16], a_scale, b, b_scale),
        lambda: cublaslt.matmul_into(out, a, a_scale, b, b_scale),
    )
    for count, call in enumerate(calls, start=1):
        call()
        call()
        assert len(fake.named("cublasLtMatmulAlgoGetHeuristic")) == count
    assert len(fake.named("cublasLtMatmul")) == 2 * len(calls)


def test_plans_beyond_the_limit_free_the_librarys_memory(fake, monkeypatch):
    monkeypatch.setattr(cublaslt, "MAX_PLANS", 2)
    _, a_scale, b, b_scale = operands()
    for M in (16, 32, 48, 64):
        cublaslt.multiply(torch.zeros(M, 48, dtype=torch.bfloat16), operands(M)[0], a_scale, b, b_scale)
    assert len(cublaslt._plans) == 2
    numbers = {
        name: [call[0] for call in fake.named(name)]
        for name in ("cublasLtMatmulDescDestroy", "cublasLtMatrixLayoutDestroy")
    }
    used = [(call[1], call[4], call[6], call[11]) for call in fake.named("cublasLtMatmul")]
    descriptors, b_layouts, a_layouts, out_layouts = zip(*used[:2], strict=True)
    assert numbers["cublasLtMatmulDescDestroy"] == list(descriptors)
    assert sorted(numbers["cublasLtMatrixLayoutDestroy"]) == sorted([*a_layouts, *b_layouts, *out_layouts])


def test_reasons_of_refused_products_have_a_limit(fake, monkeypatch):
    monkeypatch.setattr(cublaslt, "MAX_PLANS", 2)
    monkeypatch.setattr(cublaslt, "_refusals", {})
    fake.status = 15
    _, a_scale, b, b_scale = operands()
    for M in (16, 32, 48, 64, 80):
        out = torch.zeros(M, 48, dtype=torch.bfloat16)
        assert "not supported" in cublaslt.multiply(out, operands(M)[0], a_scale, b, b_scale)
        assert 1 <= len(cublaslt._refusals) <= 2


def test_threads_that_share_a_plan_do_not_mix_their_scales(fake):
    a, _, b, _ = operands()
    out = torch.zeros(32, 48, dtype=torch.bfloat16)
    count = 200

    def multiply(scales):
        for _ in range(count):
            assert cublaslt.multiply(out, a, scales[0], b, scales[1]) == ""

    pairs = [allocate_scales(2) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(pairs)) as threads:
            list(threads.map(multiply, pairs))
    finally:
        sys.setswitchinterval(interval)
    used = Counter(call[-2:] for call in fake.named("cublasLtMatmul"))
    assert used == {(pair[0].data_ptr(), pair[1].data_ptr()): count for pair in pairs}


def test_a_product_that_cublaslt_refuses_is_torchs(fake, monkeypatch):
    """The reason is in the record of operators, and the library is not asked again."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    a, b = (cast_by_amax(randn(M, 64, seed=M), E4M3) for M in (32, 48))
    operands_on_cuda = (a.rows.as_subclass(OnCuda), a.rows_scale, b.rows.as_subclass(OnCuda), b.rows_scale)
    expected = gemm.matmul(a.rows, a.rows_scale, b.rows, b.rows_scale)
    out = torch.zeros(32, 48, dtype=torch.bfloat16)
    for status in (15, 0):  # The second library would run the GEMM, and is not asked.
        library = FakeLibrary(status=status)
        monkeypatch.setattr(cublaslt, "_library", library)
        torch.testing.assert_close(gemm.matmul(*operands_on_cuda), expected)
        torch.testing.assert_close(gemm.matmul_out(out, *operands_on_cuda), expected)
        assert len(library.named("cublasLtMatmul")) == (status != 0)
        choice = dispatch.list_choices()["float8 GEMM calls"]
        assert choice.startswith("torch._scaled_mm (cublasLtMatmul of fake failed with status 15 (not supported)")

    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_refusals", {})
    monkeypatch.setattr(cublaslt, "_library", FakeLibrary(proposals=0))
    gemm.matmul(*operands_on_cuda)
    assert "proposes no algorithm, for [32, 64]" in dispatch.list_choices()["float8 GEMM calls"]
    monkeypatch.setattr(gemm, "CALLS_DIRECTLY", False)
    gemm.matmul(*operands_on_cuda)
    assert dispatch.list_choices()["float8 GEMM calls"] == "torch._scaled_mm (MEGASCALE_DIRECT_GEMMS=0)"


def test_a_product_that_cublaslt_runs_is_recorded_unless_another_was_refused(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    a, a_scale, b, b_scale = operands()
    operands_on_cuda = (a.as_subclass(OnCuda), a_scale, b.as_subclass(OnCuda), b_scale)
    unaligned = torch.zeros(32 * 48 + 1, dtype=torch.bfloat16)[1:].view(32, 48)
    with dispatch.Kernels().as_current():
        gemm.matmul(*operands_on_cuda)
        assert dispatch.list_choices()["float8 GEMM calls"].startswith("cuBLASLt")
        assert len(fake.named("cublasLtMatmul")) == 1
        gemm.matmul_out(unaligned, *operands_on_cuda)
        gemm.matmul(*operands_on_cuda)
        assert dispatch.list_choices()["float8 GEMM calls"].startswith("torch._scaled_mm (an address is not")
        assert len(fake.named("cublasLtMatmul")) == 2


def test_operands_that_a_plan_does_not_describe_are_named(fake):
    a, a_scale, b, b_scale = operands(M=33)
    out = torch.zeros(33, 48, dtype=torch.bfloat16)
    memory = torch.zeros(33 * 48 + 1, dtype=torch.bfloat16)
    assert "not a multiple of 16" in cublaslt.multiply(memory[1:].view(33, 48), a, a_scale, b, b_scale)
    assert "not contiguous" in cublaslt.multiply(out, a, a_scale, b.t().contiguous().t(), b_scale)
    assert "bias is torch.float32" in cublaslt.multiply(out, a, a_scale, b, b_scale, bias=torch.zeros(48))
    assert fake.log == []


@pytest.mark.parametrize(
    ("variables", "nbytes"),
    [
        ({}, 1 << 20),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 1 << 20),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, 128 << 10),
        ({"CUBLASLT_WORKSPACE_SIZE": "4096", "CUBLAS_WORKSPACE_CONFIG": ":1024:2:16:8"}, (2048 + 128) << 10),
        ({"CUBLASLT_WORKSPACE_SIZE": "4096"}, 4 << 20),
    ],
)
def test_torchs_workspace_of_cublaslt(monkeypatch, variables, nbytes):
    for name in ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert torch_private.get_cublaslt_workspace_bytes() == nbytes


@pytest.mark.parametrize(
    ("sizes", "kind", "message"), [((64, 64, 40), E4M3, "multiple of 16"), ((32, 48, 16), E5M2, "two E5M2")]
)
def test_cublaslt_called_alone_refuses_what_a_gemm_refuses(fake, sizes, kind, message):
    a, a_scale, b, b_scale = operands(*sizes, kind)
    with pytest.raises(FitError, match=message):
        cublaslt.matmul_into(torch.zeros(sizes[:2]), a, a_scale, b.to(kind.dtype), b_scale)
    assert fake.log == []


def test_scales_lie_16_bytes_apart_or_are_refused(fake):
    slots = allocate_scales(5, value=2.0)
    assert slots.tolist() == [2.0] * 5
    assert [slot.data_ptr() % 16 for slot in slots] == [0] * 5
    a, _, b, _ = operands()
    flat = torch.ones(8)
    for call in (gemm.matmul, lambda *given: cublaslt.matmul_into(torch.zeros(32, 48), *given)):
        call(a, slots[1], b, slots[4])
        with pytest.raises(FitError, match=r"4 bytes past a multiple of 16.*allocate_scales"):
            call(a, flat[1], b, flat[4])


def test_an_empty_tensor_casts():
    built = cast_by_amax(torch.zeros(0, 16), E4M3)
    assert isinstance(built, Float8)
    assert built.columns.shape == (16, 0)
