"""Direct calls of FlashAttention-4's kernels: a package in miniature calls the same kernels in the same order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops import dispatch, flash4_calls
from megascale.ops.flash4_calls import CHOICE_NAME, READ_RELEASES, Flash4Calls

B, S, N, D = 2, 4, 4, 16


@dataclass
class Cache:
    """Compiled functions by key, as the package keeps them."""

    functions: dict[Hashable, Callable[..., object]] = field(default_factory=dict)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.functions

    def __setitem__(self, key: Hashable, function: Callable[..., object]) -> None:
        self.functions[key] = function

    def __getitem__(self, key: Hashable) -> Callable[..., object]:
        return self.functions[key]


def run_forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *rest: Any, **options: Any
) -> None:
    assert not q.requires_grad
    groups = k.shape[2]
    heads = q.unflatten(2, (groups, -1))
    out.copy_((heads * scale + (k + v).unsqueeze(3)).flatten(2, 3))
    lse.copy_(out.float().sum(-1).transpose(1, 2))


def run_preprocess_kernel(
    out: Tensor, d_out: Tensor, sums: Tensor, lse: Tensor, scaled: Tensor, dq_sums: Tensor
) -> None:
    sums.copy_((out.float() * d_out).sum(-1).transpose(1, 2))
    scaled.copy_(2 * lse)
    dq_sums.zero_()


def run_backward_kernel(*arguments: Any) -> None:
    _, k, _, d_out, scaled, sums, dq_sums, dk, dv, scale = arguments[:10]
    semaphores = [tensor for tensor in arguments[16:19] if tensor is not None]
    assert all(not tensor.any() for tensor in semaphores), "a semaphore is not zero"
    for tensor in semaphores:
        tensor += 1
    dq_sums += (d_out * scale + (scaled - sums).transpose(1, 2).unsqueeze(3)).transpose(1, 2).flatten(2)
    grads = d_out.float().unflatten(2, (k.shape[2], -1)).sum(3)
    if dk.dim() == 3:  # sums of float32, to which several heads add
        dk += grads.transpose(1, 2).flatten(2)
        dv += 2 * grads.transpose(1, 2).flatten(2)
    else:
        dk.copy_(grads)
        dv.copy_(2 * grads)


def run_postprocess_kernel(sums: Tensor, grad: Tensor, scale: float, *rest: Any) -> None:
    grad.copy_((sums * scale).view(B, -1, S, D).transpose(1, 2))


@dataclass
class Package:
    """The package in miniature.

    Attributes:
        calls: number of calls of the package's functions.
        extra_argument: a further argument of the forward's kernel.
        options: arguments of the forward's kernel that the package passes by keyword.
    """

    calls: int = 0
    extra_argument: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def make_interface(self) -> SimpleNamespace:
        """Return the package's module."""
        kernels: dict[str, Callable[..., object]] = {
            "_flash_attn_fwd": run_forward_kernel,
            "_bwd_preprocess": run_preprocess_kernel,
            "_flash_attn_bwd": run_backward_kernel,
            "_bwd_postprocess_convert": run_postprocess_kernel,
        }

        def launch(function: Any, *arguments: Any, **options: Any) -> None:
            key = "key"
            if key not in function.compile_cache:
                function.compile_cache[key] = kernels[function.__name__]
            function.compile_cache[key](*arguments, **options)

        def _flash_attn_fwd(q, k, v, *, causal, window_size_left, out, lse):
            self.calls += 1
            arguments = (q.detach(), k.detach(), v.detach(), out.detach(), lse, 0.5, None, window_size_left)
            launch(_flash_attn_fwd, *arguments, self.extra_argument, **self.options)

        def _bwd_preprocess(*arguments):
            launch(_bwd_preprocess, *arguments)

        def _bwd_postprocess_convert(*arguments):
            launch(_bwd_postprocess_convert, *arguments)

        def _flash_attn_bwd(q, k, v, out, d_out, lse, *, causal, window_size_left, deterministic, dq, dk, dv):
            self.calls += 1
            sums, scaled = torch.empty_like(lse), torch.empty_like(lse)
            dq_sums = torch.full((B, N, S * D), torch.nan)
            groups = k.shape[2]
            has_groups = groups < N
            dk_sums, dv_sums = torch.zeros(2, B, groups, S * D) if has_groups else (None, None)
            semaphore = torch.zeros(B, N, dtype=torch.int32) if deterministic else None
            _bwd_preprocess(out, d_out, sums, lse, scaled, dq_sums)
            dk_out, dv_out = (dk_sums, dv_sums) if has_groups else (dk, dv)
            arguments = (q.detach(), k.detach(), v.detach(), d_out, scaled, sums, dq_sums, dk_out, dv_out, 0.5)
            nothing = (None, None)
            launch(_flash_attn_bwd, *arguments, *[None] * 4, window_size_left, None, semaphore, None, None, nothing)
            _bwd_postprocess_convert(dq_sums, dq, 0.5, None)
            if has_groups:
                _bwd_postprocess_convert(dk_sums, dk, 0.5, None)
                _bwd_postprocess_convert(dv_sums, dv, 1.0, None)

        functions: list[Any] = [_flash_attn_fwd, _bwd_preprocess, _flash_attn_bwd, _bwd_postprocess_convert]
        for function in functions:
            function.compile_cache = Cache()
        return SimpleNamespace(**{function.__name__: function for function in functions})


def make_tensors(seed: int, groups: int, offset: int = 0) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of the output, [B, S, heads, D]; the first three require gradients.

    Args:
        offset: elements of q's memory before q.
    """
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(offset + B * S * N * D, generator=generator).requires_grad_()
    q = memory[offset:].view(B, S, N, D)
    k, v = (torch.randn(B, S, groups, D, generator=generator).requires_grad_() for _ in range(2))
    return q, k, v, torch.randn(B, S, N, D, generator=generator)


def run(calls: Flash4Calls, tensors: tuple[Tensor, ...], window: int | None, deterministic: bool) -> list[Tensor]:
    """Return the results of a forward and a backward."""
    q, k, v, d_out = tensors
    out, lse = torch.empty(q.shape), torch.empty(B, N, S)
    with torch.no_grad():
        calls.run_forward(q, k, v, out, lse, causal=True, window_size_left=window)
        dq, dk, dv = (torch.empty(tensor.shape) for tensor in (q, k, v))
        calls.run_backward(
            q,
            k,
            v,
            out,
            d_out,
            lse,
            (dq, dk, dv),
            causal=True,
            window_size_left=window,
            deterministic=deterministic,
        )
    return [out, lse, dq, dk, dv]


@pytest.mark.parametrize("groups", [N, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_later_calls_give_the_bits_of_the_package(groups, window, deterministic):
    package = Package()
    calls = Flash4Calls(package.make_interface())
    reference = Flash4Calls(Package().make_interface(), obstacle="for comparison")
    for seed in range(4):
        tensors = make_tensors(seed, groups)
        results = run(calls, tensors, window, deterministic)
        for result, expected in zip(results, run(reference, tensors, window, deterministic), strict=True):
            assert torch.equal(result, expected)
    assert package.calls == 2  # the first forward and the first backward


def test_each_problem_has_a_plan_of_its_own():
    package = Package()
    calls = Flash4Calls(package.make_interface())
    problems = [(N, None, False), (2, None, False), (N, 3, False), (N, None, True)]
    for _ in range(2):
        for groups, window, deterministic in problems:
            run(calls, make_tensors(0, groups), window, deterministic)
    # Forwards do not depend on determinism.
    assert package.calls == 3 + 4


def test_unaligned_inputs_go_through_the_package():
    """The package copies them, and a plan has no copies."""
    package = Package()
    calls = Flash4Calls(package.make_interface())
    reference = run(calls, make_tensors(0, N), None, False)
    assert package.calls == 2
    tensors = make_tensors(0, N, offset=1)
    with torch.no_grad():
        tensors[0].copy_(make_tensors(0, N)[0])
    for result, expected in zip(run(calls, (tensors[0], *make_tensors(0, N)[1:]), None, False), reference, strict=True):
        assert torch.equal(result, expected)
    assert package.calls == 4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (torch.ones(2), "argument 8 of _flash_attn_fwd is not an input"),
        ("text", "_flash_attn_fwd passes str to a kernel"),
        ((1, None), "_flash_attn_fwd passes tuple to a kernel"),
    ],
)
def test_an_unknown_argument_leaves_the_problem_to_the_package(argument, message):
    package = Package(extra_argument=argument)
    calls = Flash4Calls(package.make_interface())
    for seed in range(3):
        run(calls, make_tensors(seed, N), None, False)
    assert package.calls == 3 + 1  # all forwards, and the first backward
    assert dispatch.list_choices()[CHOICE_NAME] == f"through the package for some problems ({message})"


def test_an_argument_by_keyword_leaves_the_problem_to_the_package():
    """Another release may pass its stream in this way, which a plan would omit."""
    package = Package(options={"stream": 7})
    calls = Flash4Calls(package.make_interface())
    for seed in range(3):
        run(calls, make_tensors(seed, N), None, False)
    assert package.calls == 3 + 1
    message = "_flash_attn_fwd passes stream by keyword"
    assert dispatch.list_choices()[CHOICE_NAME] == f"through the package for some problems ({message})"


def test_an_unknown_order_of_kernels_leaves_the_problem_to_the_package():
    package = Package()
    interface = package.make_interface()
    forward = interface._flash_attn_fwd
    cache = forward.compile_cache

    def twice(*arguments: Any, **options: Any) -> None:
        forward(*arguments, **options)
        forward(*arguments, **options)

    interface._flash_attn_fwd = twice
    interface.original = forward
    calls = Flash4Calls(interface)
    for seed in range(3):
        run(calls, make_tensors(seed, N), None, False)
    assert package.calls == 2 * 3 + 1
    assert "calls _flash_attn_fwd, _flash_attn_fwd" in dispatch.list_choices()[CHOICE_NAME]
    assert forward.compile_cache is cache  # recording has ended


def test_an_error_of_the_package_leaves_its_caches_as_they_were():
    interface = Package().make_interface()
    cache = interface._flash_attn_fwd.compile_cache
    calls = Flash4Calls(interface)
    q, k, v, _ = make_tensors(0, N)
    wrong_out, lse = torch.empty(1), torch.empty(B, N, S)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(RuntimeError, match="broadcast shape"):
            calls.run_forward(q, k, v, wrong_out, lse, causal=True, window_size_left=None)
    assert interface._flash_attn_fwd.compile_cache is cache


def test_other_releases_go_through_the_package(monkeypatch):
    assert flash4_calls._find_obstacle() == "MEGASCALE_DIRECT_ATTENTION=1 calls its compiled kernels directly"
    monkeypatch.setattr(flash4_calls, "CALLS_DIRECTLY", True)
    monkeypatch.setattr(flash4_calls.metadata, "version", READ_RELEASES.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert flash4_calls._find_obstacle() == ""
    for package, release in READ_RELEASES.items():
        versions = {**READ_RELEASES, package: "9.9"}
        monkeypatch.setattr(flash4_calls.metadata, "version", versions.get)
        assert flash4_calls._find_obstacle() == f"{package} is 9.9, and {release} was read"
    monkeypatch.setattr(flash4_calls.metadata, "version", READ_RELEASES.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert flash4_calls._find_obstacle() == "compute capability 10.0, and only Hopper's kernels were read"
