"""Runtimes of engines: two engines of one process never share state."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.core.calls import NullCallLog
from megascale.errors import ConfigError
from megascale.ops import dispatch
from megascale.ops.attention import attention
from megascale.ops.norm import rms_norm
from megascale.train.engine import Engine
from megascale.train.parking import LeaveAttempt
from tests.exact.cases import case
from tests.exact.training import Late, RankReport, make_engine, run_step


class Log(NullCallLog):
    """Notes where its engine stands."""

    def __init__(self) -> None:
        self.places: list[bytes] = []

    def set_action(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        self.places.append(action)


def test_a_step_ends_before_its_next_action_once_its_rank_must_leave():
    """The host could otherwise submit the rest of the step to a GPU for whose results no rank waits."""
    engine = make_engine(0, 1, case(microbatches=4).tree)
    log = Log()
    engine.runtime.calls = log

    def check_orders() -> None:
        if len(log.places) == 3:
            raise LeaveAttempt("the agent ordered this rank to leave the attempt")

    engine.runtime.check_orders = check_orders
    with pytest.raises(LeaveAttempt):
        run_step(engine, 1, RankReport())
    assert len(log.places) == 3


def test_engines_of_one_process_share_nothing():
    tree = case(microbatches=1, model={"layers": 1}).tree
    first, second = make_engine(0, 1, tree), make_engine(0, 1, {**tree, "kernels": {"attention": "sdpa"}})
    first.runtime.calls, first.runtime.stream = Log(), Late()
    report = [RankReport(), RankReport()]
    for engine, item in zip((second, first), report, strict=True):
        run_step(engine, 1, item)
    assert first.runtime.calls.places[-1] == b"optimizer"
    assert type(second.runtime.calls) is NullCallLog
    assert not first.runtime.stream.open
    assert not second.runtime.attention.describe()
    assert len(first.runtime.attention.describe()) == 1  # the other was told which kernel to run
    assert report[0].losses == report[1].losses
    assert report[0].norms == report[1].norms
    chunk = first.chunks[0]
    assert chunk.linears.axis.runtime is first.runtime is first.data_parallel.buffers[0].axes.tensor.runtime


def two_modes() -> list[Engine]:
    """An engine with kernels.mode=auto and one with reference, made in this order."""
    tree = case(microbatches=2, model={"layers": 1}).tree
    return [make_engine(0, 1, {**tree, "kernels": {"mode": mode}}) for mode in ("auto", "reference")]


def run_for(engine: Engine) -> dict[str, str]:
    """What its operators ran, but for attention and what has no mode."""
    active = engine.runtime.kernels.list_choices()
    return {op: choice for op, choice in active.items() if choice.startswith("reference")}


def test_engines_of_one_process_have_each_their_own_kernels():
    before, engines = dispatch.DEFAULT.list_choices(), two_modes()
    for step in (1, 2):
        for engine in engines:
            run_step(engine, step, RankReport())
    auto, reference = map(run_for, engines)
    assert set(auto) == set(reference) >= {"layer norm", "add norm", "gelu", "cross entropy", "adamw"}
    assert set(auto.values()) == {"reference (cpu tensors)"}
    assert set(reference.values()) == {"reference (kernels.mode)"}
    assert "linear layers" in engines[0].runtime.kernels.list_choices()
    assert dispatch.DEFAULT.list_choices() == before
    assert dispatch.get_mode() == "auto"


def test_engines_of_two_threads_have_each_their_own_kernels():
    engines, pair = two_modes(), Barrier(2)

    def meet(grad: torch.Tensor) -> None:
        pair.wait(60)  # both stand in their backward passes at once

    for engine in engines:
        engine.chunks[0].norm.weight.register_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda engine: run_step(engine, 1, RankReport()), engines))
    auto, reference = map(run_for, engines)
    assert set(auto) == set(reference)
    assert set(auto.values()) == {"reference (cpu tensors)"}
    assert set(reference.values()) == {"reference (kernels.mode)"}


def test_an_engine_evaluates_and_fails_with_its_own_kernels_and_leaves_none_behind():
    _, engine = two_modes()
    rows = torch.zeros(engine.config.model.sequence_length, 1, dtype=torch.int64)
    engine.sum_losses(Batch(rows, rows))
    assert set(run_for(engine).values()) == {"reference (kernels.mode)"}

    def no_batch(i: int) -> Batch[torch.Tensor]:
        assert dispatch.get_mode() == "reference"
        raise LookupError(i)

    with pytest.raises(LookupError):
        engine.step(no_batch, 1, 0.0)
    assert dispatch.get_mode() == "auto"


def test_operators_that_no_engine_calls_have_a_default():
    rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
    assert dispatch.DEFAULT.list_choices()["rms norm"].startswith("reference")


def told_torch() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_torch_is_deterministic_while_an_engine_that_wants_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = told_torch()
    assert before == (False, True)
    tree = case(microbatches=2, model={"layers": 1}).tree
    engine, usual = (make_engine(0, 1, {**tree, "kernels": {"deterministic": on}}) for on in (True, False))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    observed: list[tuple[bool, bool]] = []
    for item in (engine, usual):
        item.chunks[0].norm.weight.register_hook(lambda grad: observed.append(told_torch()))
    report = RankReport(), RankReport()
    for step in (1, 2):
        for item, of in zip((engine, usual), report, strict=True):
            run_step(item, step, of)
            assert told_torch() == before
    assert observed == [(True, False)] * 2 + [before] * 2 + [(True, False)] * 2 + [before] * 2
    assert report[0].losses == report[1].losses
    assert report[0].norms == report[1].norms

    def fails(i: int) -> Batch[torch.Tensor]:
        assert told_torch() == (True, False)
        raise LookupError(i)

    with pytest.raises(LookupError):
        engine.step(fails, 3, 0.0)
    assert told_torch() == before


def get_from_c(name: bytes) -> bytes | None:
    """Return a variable of the environment as libraries written in C read it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    value: bytes | None = getenv(name)
    return value


@pytest.mark.parametrize(
    ("value", "is_hopper", "is_read_again", "expected"),
    [
        (":4096:8", True, False, None),
        (":4096:8", True, True, b":4096:8"),
        (":4096:8", False, False, b":4096:8"),
        (":16:8", True, False, b":16:8"),
    ],
)
def test_torch_does_not_parse_the_workspace_in_each_gemm(
    monkeypatch: pytest.MonkeyPatch, value: str, is_hopper: bool, is_read_again: bool, expected: bytes | None
) -> None:
    """The setting is hidden from C only where torch's default is as large, and where torch has read it once."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    monkeypatch.setattr(dispatch, "_has_large_workspace", lambda device: is_hopper)
    multiply = torch.mm

    def multiply_deterministically(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if is_read_again and torch.are_deterministic_algorithms_enabled():
            assert get_from_c(b"CUBLAS_WORKSPACE_CONFIG") is None
            raise RuntimeError("CUBLAS_WORKSPACE_CONFIG is not deterministic")
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", multiply_deterministically)
    line = dispatch.hide_workspace_setting(torch.device("cpu"))
    assert get_from_c(b"CUBLAS_WORKSPACE_CONFIG") == expected
    assert bool(line) == (expected is None)
    assert dispatch.prepare_workspace() == ""  # the setting is not set anew
    assert get_from_c(b"CUBLAS_WORKSPACE_CONFIG") == expected


FIRST_USE = """
import sys
import torch
from megascale.ops.dispatch import Kernels
kernels = Kernels(deterministic=True)
with kernels.as_current():
    print(torch.are_deterministic_algorithms_enabled(), "torch._inductor" in sys.modules)
    import torch._inductor.config as compiler
    print(compiler.deterministic)
print(compiler.deterministic)
with kernels.as_current():
    print(compiler.deterministic)
"""


def test_deterministic_operators_do_not_import_the_compiler_and_bind_it_when_it_is() -> None:
    """An attention kernel may be the first to import the compiler, within a step."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_DETERMINISTIC"}
    result = subprocess.run(
        [sys.executable, "-c", FIRST_USE], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    assert result.stdout.split() == ["True", "False", "True", "False", "True"]


def test_torch_is_deterministic_until_the_last_thread_that_wants_it_has_left() -> None:
    kernels = dispatch.Kernels(deterministic=True)
    inside = Event()
    leave = Event()

    def hold() -> bool:
        with kernels.as_current():
            inside.set()
            leave.wait(60)
            return told_torch()[0]

    with ThreadPoolExecutor(1) as threads:
        with kernels.as_current():
            stored = threads.submit(hold)
            assert inside.wait(60)
        leave.set()
        assert stored.result()
    assert told_torch() == (False, True)


def test_what_has_no_fixed_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q_SBND = torch.zeros(4, 1, 1, 8)
    with pytest.raises(ConfigError, match=r"kernels.attention='cudnn'.*kernels.deterministic=true.*attention=auto"):
        from_tree({"kernels": {"attention": "cudnn", "deterministic": True}})
    refused = pytest.raises(ConfigError, match=r"no deterministic backward \(kernels.deterministic\)")
    with dispatch.Kernels(deterministic=True).as_current(), refused:
        attention(q_SBND, q_SBND, q_SBND, window=None, backend="cudnn")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"kernels.deterministic=true needs CUBLAS_WORKSPACE_CONFIG=:4096:8.*':0:0'"):
        dispatch.Kernels(deterministic=True)
