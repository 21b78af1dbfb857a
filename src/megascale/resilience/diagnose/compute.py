"""Checks of a device's arithmetic: the rate of GEMMs, equal bits in repetitions, and a small model trained twice."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megascale.resilience.diagnose.check import SelfCheck, make_failed_check

GEMM_SECONDS = 0.5  # per measurement on a device
_MAX_GEMMS = 200  # GEMMs per measurement
_MIN_SECONDS = 1e-4  # A shorter measured time of one GEMM is mostly the time of its launch.
# The small model and its training.
_STEPS = 6
_LAYERS = 2
_HIDDEN = 64
_FFN_HIDDEN = 256
_HEADS = 4
_LENGTH = 32  # tokens per sequence
_SEQUENCES = 4  # per batch
_VOCAB = 96
_WEIGHT_STD = 0.05  # standard deviation of initial weights
_LEARNING_RATE = 0.5


def list_devices() -> list[torch.device]:
    """Return the GPUs, or the CPU if there are none."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(device: torch.device, function: Callable[[], object], repeats: int = 3) -> float:
    """Return the seconds of the fastest of `repeats` calls, since a check measures the hardware and not its load."""
    function()
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def compute_digest(*tensors: torch.Tensor) -> str:
    """Return a hash of the tensors' bits as 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one CPU thread, so that the order of sums does not depend on the number of free cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_gemms() -> Iterator[SelfCheck]:
    """Measure the rate of GEMMs, and compare the bits of repeated GEMMs."""
    for device in list_devices():
        size = 768
        dtype = torch.float32
        if device.type == "cuda":
            size = 8192
            dtype = torch.bfloat16
        generator = torch.Generator().manual_seed(7)
        a = torch.randn(size, size, generator=generator).to(device, dtype)
        b = torch.randn(size, size, generator=generator).to(device, dtype)
        rate = _measure_gemm_rate(device, a, b)
        yield SelfCheck(f"gemm rate {device}", "passed", rate, "TFLOP/s", details=f"{size} x {size}, {dtype}")
        yield _compare_gemm_bits(device, a, b)


def _measure_gemm_rate(device: torch.device, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the rate of square GEMMs in TFLOP/s."""
    out = torch.empty_like(a)

    def multiply(calls: int) -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    seconds = measure_seconds(device, lambda: multiply(1), repeats=1)
    # As many calls as take about GEMM_SECONDS.
    calls = min(_MAX_GEMMS, max(1, int(GEMM_SECONDS / max(_MIN_SECONDS, seconds))))
    seconds = measure_seconds(device, lambda: multiply(calls), repeats=2)
    return 2 * a.shape[0] ** 3 * calls / seconds / 1e12


def _compare_gemm_bits(device: torch.device, a: torch.Tensor, b: torch.Tensor) -> SelfCheck:
    """Multiply the same matrices repeatedly, and compare the bits of the products."""
    name = f"gemm bits {device}"
    repeats = 20 if device.type == "cuda" else 4
    with _one_thread():
        first = torch.mm(a, b)
        for gemm_number in range(2, repeats + 2):
            if not torch.equal(torch.mm(a, b), first):
                return make_failed_check(name, f"GEMM {gemm_number} of the same matrices has other bits")
        if not torch.isfinite(first).all():
            return make_failed_check(name, "a GEMM of finite matrices is not finite")
        return SelfCheck(name, "passed", digest=compute_digest(first), details=f"{repeats + 1} equal GEMMs")


@dataclass(frozen=True)
class _TrainingResult:
    """The result of a training of the small model."""

    digest: str  # of the weights
    first_loss: float
    last_loss: float


def check_small_model() -> Iterator[SelfCheck]:
    """Train a small transformer for a few steps, twice, and compare the weights bit by bit.

    The digest must also be equal on other machines of the kind.
    """
    for device in list_devices():
        name = f"small model {device}"
        with _one_thread():
            result = _train(device)
            repeated = _train(device)
        losses = f"{result.first_loss:.4f} to {result.last_loss:.4f}"
        if result.digest != repeated.digest:
            yield make_failed_check(name, f"the same training gave weights {result.digest} and {repeated.digest}")
        elif not result.last_loss < result.first_loss:
            yield make_failed_check(name, f"training did not lower the loss: {losses}")
        else:
            details = f"loss {losses} in {_STEPS} steps, twice the same"
            yield SelfCheck(name, "passed", digest=result.digest, details=details)


def _train(device: torch.device) -> _TrainingResult:
    """Train a small transformer for `_STEPS` steps on fixed tokens."""
    generator = torch.Generator().manual_seed(11)

    def make_weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * _WEIGHT_STD).to(device).requires_grad_()

    embedding = make_weight(_VOCAB, _HIDDEN)
    positions = make_weight(_LENGTH, _HIDDEN)
    parameters = [embedding, positions]
    layers = []
    for _ in range(_LAYERS):
        qkv = make_weight(3 * _HIDDEN, _HIDDEN)
        out = make_weight(_HIDDEN, _HIDDEN)
        up = make_weight(_FFN_HIDDEN, _HIDDEN)
        down = make_weight(_HIDDEN, _FFN_HIDDEN)
        layers.append((qkv, out, up, down))
        parameters += [qkv, out, up, down]
    tokens = torch.randint(_VOCAB, (_SEQUENCES, _LENGTH + 1), generator=generator).to(device)
    # Use products with one-hot vectors. The backward of a gather would add atomically in any order.
    inputs = F.one_hot(tokens[:, :-1], _VOCAB).to(embedding.dtype)
    targets = F.one_hot(tokens[:, 1:], _VOCAB).to(embedding.dtype)
    mask = torch.full((_LENGTH, _LENGTH), float("-inf"), device=device).triu(1)
    losses = []
    for _ in range(_STEPS):
        x = inputs @ embedding + positions
        for qkv, out, up, down in layers:
            x = x + _attention(F.layer_norm(x, (_HIDDEN,)), qkv, mask) @ out.t()
            h = F.layer_norm(x, (_HIDDEN,)) @ up.t()
            x = x + F.gelu(h) @ down.t()
        log_probabilities = torch.log_softmax(x @ embedding.t(), -1)
        loss = -(log_probabilities * targets).sum(-1).mean()
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= _LEARNING_RATE * gradient
    return _TrainingResult(compute_digest(*parameters), losses[0], losses[-1])


def _attention(x: torch.Tensor, qkv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return causal self-attention of x [batch, length, hidden], before the output projection."""
    batch, length, _ = x.shape
    head_size = _HIDDEN // _HEADS
    q, k, v = (x @ qkv.t()).view(batch, length, 3, _HEADS, head_size).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(q @ k.transpose(-1, -2) / head_size**0.5 + mask, -1)
    return (weights @ v).transpose(1, 2).reshape(batch, length, _HIDDEN)
