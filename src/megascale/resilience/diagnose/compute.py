"""Does a device compute: the rate of GEMMs, the same bits every time, a small model trained twice."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import torch

from megascale.resilience.diagnose.check import SelfCheck

SECONDS = 0.5  # of GEMMs on a device


def devices() -> list[torch.device]:
    """The accelerators, else the CPU."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def synchronize(device: torch.device) -> None:
    """Wait for a device; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, act: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of one call, the best of a few: a check asks what the hardware can do, not how busy it is."""
    act()
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        act()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def digest(*tensors: torch.Tensor) -> str:
    """16 hexadecimal digits of the bits."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def gemms() -> Iterator[SelfCheck]:
    """Rate of GEMMs, and whether the same GEMM gives the same bits every time."""
    for device in devices():
        cuda = device.type == "cuda"
        size, kind = (8192, torch.bfloat16) if cuda else (768, torch.float32)
        generator = torch.Generator().manual_seed(7)
        a = torch.randn(size, size, generator=generator).to(device, kind)
        b = torch.randn(size, size, generator=generator).to(device, kind)
        out = torch.empty_like(a)
        calls = max(1, int(SECONDS / max(1e-4, seconds_of(device, lambda: torch.mm(a, b, out=out), 1))))  # noqa: B023
        calls = min(calls, 200)

        def several() -> None:
            for _ in range(calls):  # noqa: B023
                torch.mm(a, b, out=out)  # noqa: B023

        rate = 2 * size**3 * calls / seconds_of(device, several, 2) / 1e12
        yield SelfCheck(f"gemm rate {device}", "passed", rate, "TFLOP/s", details=f"{size} x {size}, {kind}")
        yield _same_bits(device, a, b)


def _same_bits(device: torch.device, a: torch.Tensor, b: torch.Tensor) -> SelfCheck:
    name = f"gemm bits {device}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums must not depend on how many cores are free
    try:
        first = torch.mm(a, b)
        repeats = 20 if device.type == "cuda" else 4
        for number in range(repeats):
            if not torch.equal(torch.mm(a, b), first):
                return SelfCheck(name, "failed", details=f"GEMM {number + 2} of the same matrices has other bits")
        if not torch.isfinite(first).all():
            return SelfCheck(name, "failed", details="a GEMM of finite matrices is not finite")
        return SelfCheck(name, "passed", digest=digest(first), details=f"{repeats + 1} equal GEMMs")
    finally:
        torch.set_num_threads(threads)


def small_model() -> Iterator[SelfCheck]:
    """A small transformer trained for a few steps, twice: bit by bit the same, and as on other machines of the kind."""
    for device in devices():
        name = f"small model {device}"
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            one, two = _train(device), _train(device)
        finally:
            torch.set_num_threads(threads)
        if one[0] != two[0]:
            yield SelfCheck(name, "failed", details=f"the same training gave weights {one[0]} and {two[0]}")
        elif not one[1] < one[2]:
            yield SelfCheck(name, "failed", details=f"training did not lower the loss: {one[2]:.4f} to {one[1]:.4f}")
        else:
            text = f"loss {one[2]:.4f} to {one[1]:.4f} in {_STEPS} steps, twice the same"
            yield SelfCheck(name, "passed", digest=one[0], details=text)


_STEPS, _LAYERS, _HIDDEN, _HEADS, _LENGTH, _VOCAB = 6, 2, 64, 4, 32, 96


def _train(device: torch.device) -> tuple[str, float, float]:
    """(digest of the weights, last loss, first loss)."""
    generator = torch.Generator().manual_seed(11)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(device).requires_grad_()

    embedding, positions = weight(_VOCAB, _HIDDEN), weight(_LENGTH, _HIDDEN)
    layers = [
        (weight(3 * _HIDDEN, _HIDDEN), weight(_HIDDEN, _HIDDEN), weight(256, _HIDDEN), weight(_HIDDEN, 256))
        for _ in range(_LAYERS)
    ]
    parameters = [embedding, positions, *(w for layer in layers for w in layer)]
    tokens = torch.randint(_VOCAB, (4, _LENGTH + 1), generator=generator).to(device)
    one_hot = torch.nn.functional.one_hot(tokens[:, :-1], _VOCAB).to(
        embedding.dtype
    )  # a gather's backward adds atomically
    mask = torch.full((_LENGTH, _LENGTH), float("-inf"), device=device).triu(1)
    losses = []
    for _ in range(_STEPS):
        x = one_hot @ embedding + positions
        for qkv, out, up, down in layers:
            x = x + _attention(torch.nn.functional.layer_norm(x, (_HIDDEN,)), qkv, mask) @ out.t()
            h = torch.nn.functional.layer_norm(x, (_HIDDEN,)) @ up.t()
            x = x + torch.nn.functional.gelu(h) @ down.t()
        logits = torch.log_softmax(x @ embedding.t(), -1)
        target = torch.nn.functional.one_hot(tokens[:, 1:], _VOCAB).to(logits.dtype)
        loss = -(logits * target).sum(-1).mean()
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p -= 0.5 * g
    return digest(*parameters), losses[-1], losses[0]


def _attention(x: torch.Tensor, qkv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    parts = (x @ qkv.t()).view(batch, length, 3, _HEADS, _HIDDEN // _HEADS).permute(2, 0, 3, 1, 4)
    q, k, v = parts[0], parts[1], parts[2]
    weights = torch.softmax(q @ k.transpose(-1, -2) / (_HIDDEN // _HEADS) ** 0.5 + mask, -1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, _HIDDEN)
