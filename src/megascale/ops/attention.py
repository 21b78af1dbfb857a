"""Causal attention with an optional sliding window, over views of the fused QKV output, by the fastest kernel.

A window counts the token itself: window=1 sees only itself, window=S is full causal attention. On CUDA the kernel
is chosen by measuring, forward and backward, those that implement the mask (`AttentionChooser`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.errors import ConfigError
from megascale.ops import dispatch
from megascale.ops.attention_backends import BACKENDS, candidates, causal_mask
from megascale.ops.rope import split_qkv

AGREEMENT = 2e-2  # norm-wise, in bfloat16, between kernels of the same mask
REPEATS = 5
WARM_UP_SECONDS = 0.3
BUSY_GEMMS = 12  # 2.5 ms on an H200: longer than launching an attention both ways takes


def attention_reference(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, *, window: int | None) -> Tensor:
    """Explicit softmax over an explicit mask, in at least float32: what every backend is compared with."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    q = q_SBND.to(wide).unflatten(2, (G, N // G))
    scores = torch.einsum("sbgnd,tbgd->bgnst", q, k_SBGD.to(wide)) * D**-0.5
    seen = causal_mask(S, k_SBGD.shape[0], window, q_SBND.device)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bgnst,tbgd->sbgnd", weights, v_SBGD.to(wide)).reshape(S, B, N * D).to(q_SBND.dtype)


class AttentionShape(NamedTuple):
    """What a choice depends on. window is None for full attention."""

    S: int
    B: int
    N: int
    G: int
    D: int
    window: int | None
    dtype: torch.dtype

    def __str__(self) -> str:
        mask = "full" if self.window is None else f"window {self.window}"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.S} x {self.B}, {self.N} heads ({self.G} kv) of {self.D}, {mask}, {kind}"


@dataclass
class AttentionChoice:
    """The kernel for one shape; milliseconds forward + backward of those that ran, and why others did not."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name} {ms:.3f} ms" for name, ms in sorted(self.milliseconds.items(), key=lambda item: item[1])]
        parts += [f"{name}: {why}" for name, why in self.refused.items()]
        return self.name + (f" ({'; '.join(parts)})" if parts else "")


def measure(shape: AttentionShape, device: torch.device) -> AttentionChoice:
    """Run every backend that may serve the shape; the fastest of those that agree."""
    if device.type != "cuda" or shape.dtype not in (torch.bfloat16, torch.float16):
        return AttentionChoice("sdpa")
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"attention for {shape} would be measured inside a CUDA graph capture; call "
            "AttentionChooser.choose for every shape before capturing"
        )
    busy = _Busy(device)
    busy.warm_up()
    choice = AttentionChoice("sdpa")
    agreed: Tensor | None = None
    for name in (*candidates(shape.window), "sdpa"):
        if name == "sdpa" and choice.milliseconds:
            break  # the last resort: slow, and its explicit mask may not even fit
        try:
            milliseconds, out = _time(name, shape, device, busy)
        except Exception as error:  # a kernel that cannot serve a shape says so in many ways
            choice.refused[name] = _first_line(error)
            continue
        agreed = out if agreed is None else agreed
        apart = ((out.float() - agreed.float()).norm() / agreed.float().norm()).item()
        if not apart <= AGREEMENT:
            choice.refused[name] = f"its output is {apart:.1e} away from {next(iter(choice.milliseconds))}'s"
        else:
            choice.milliseconds[name] = milliseconds
    if choice.milliseconds:
        choice.name = min(choice.milliseconds, key=choice.milliseconds.__getitem__)
    return choice


class _Busy:
    """GEMMs that keep a GPU busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self._y = torch.empty_like(self._x)

    def warm_up(self) -> None:
        """Until the clock of an idle GPU has risen: whichever kernel came first would look slow."""
        end = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < end:
            self.launch()
            torch.cuda.synchronize(self._device)

    def launch(self) -> None:
        """For milliseconds: what is launched meanwhile follows without the host's gaps, as in a CUDA graph."""
        for _ in range(BUSY_GEMMS):
            torch.mm(self._x, self._x, out=self._y)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


def _as_it_is(x: Tensor) -> Tensor:
    return x


class AttentionChooser:
    """Measures once a shape which kernel is fastest there, and remembers.

    Args:
        backend: kernels.attention: the one that serves all shapes, or "auto".
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.choices: dict[AttentionShape, AttentionChoice] = {}
        self.measure: Callable[[AttentionShape, torch.device], AttentionChoice] = measure

    def choose(
        self,
        S: int,
        B: int,
        N: int,
        G: int,
        D: int,
        window: int | None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> str:
        """The backend for this shape, measured at the first call. Call it at start-up, before any graph capture.

        S tokens, B samples, N query heads, G key/value heads of width D. On CPU, and in types that no fused
        attention takes, that is torch's own pick.
        """
        if window is not None and window >= S:
            window = None
        shape = AttentionShape(S, B, N, G, D, window, dtype)
        if shape not in self.choices:
            # Who asks may be recomputed in backward: what is saved while measuring must not count as saved by it.
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                self.choices[shape] = self.measure(shape, torch.device(device))
            dispatch.note(f"attention {shape}", str(self.choices[shape]))
        return self.choices[shape].name

    def adopt(self, shape: AttentionShape, name: str, why: str = "") -> None:
        """Take what all ranks have agreed on, so that they run the same kernel; `why` is for people."""
        self.choices[shape] = AttentionChoice(name)
        dispatch.note(f"attention {shape}", f"{name} ({why})" if why else name)

    def explain_refusal(self, name: str, shape: AttentionShape, device: torch.device) -> str:
        """Why a backend cannot run a shape on this process's device; "" if it can."""
        if name == "sdpa":
            return ""
        if name not in BACKENDS:
            return "this version does not know it"
        try:
            _once(name, shape, *_inputs(shape, device))
        except Exception as error:  # as in `measure`
            return _first_line(error)
        return ""

    def describe(self) -> list[str]:
        """One printable line a shape: the choice, what was measured, what could not run and why."""
        return [f"attention {shape}: {choice}" for shape, choice in self.choices.items()]


def _inputs(shape: AttentionShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """The fused QKV output and the gradient of the result, made up."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.S, shape.B, (shape.N + 2 * shape.G) * shape.D)
    qkv = torch.randn(sizes, device=device, generator=generator).to(shape.dtype).requires_grad_()
    return qkv, torch.randn(shape.S, shape.B, shape.N * shape.D, device=device, generator=generator).to(shape.dtype)


def _once(name: str, shape: AttentionShape, qkv: Tensor, upstream: Tensor) -> Tensor:
    """Forward + backward through the QKV split; the output."""
    with torch.enable_grad():
        out = BACKENDS[name](*split_qkv(qkv, shape.N, shape.G), shape.window)
        torch.autograd.grad(out, qkv, upstream)
    return out.detach()


def _time(name: str, shape: AttentionShape, device: torch.device, busy: _Busy) -> tuple[float, Tensor]:
    """Best milliseconds that the GPU takes for forward + backward through the QKV split, and the output."""
    qkv, upstream = _inputs(shape, device)
    best, out = float("inf"), upstream
    for repeat in range(2 + REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy.launch()
        start.record()
        out = _once(name, shape, qkv, upstream)
        stop.record()
        stop.synchronize()
        if repeat >= 2:
            best = min(best, start.elapsed_time(stop))
    return best, out


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    window: int | None,
    backend: str = "auto",
    chooser: AttentionChooser | None = None,
) -> Tensor:
    """Causal attention; returns [S, B, N*D].

    q_SBND: [queries, batch, heads, head size]; k_SBGD, v_SBGD: [keys, batch, groups, head size], heads a multiple
    of groups; views of the fused QKV output are read where they lie. window: tokens a query sees, itself included;
    None for all before it. With fewer queries than keys (generation) the last query stands at the last key.
    backend: "auto" is the chooser's, else a name of `BACKENDS`. Raises ConfigError for an unknown name.
    chooser: knows what kernels.attention says and what was measured; default: one that knows nothing.
    """
    S, B, N, D = q_SBND.shape
    T, G = k_SBGD.shape[0], k_SBGD.shape[2]
    if window is not None and window >= T:
        window = None
    chooser = chooser or AttentionChooser()
    name = chooser.backend if backend == "auto" else backend
    if S != T:
        name = "sdpa"  # a cache: the training kernels have no such mask
    elif name == "auto" and dispatch.mode() == "reference":
        name = "sdpa"
    elif name == "auto":
        known = chooser.choices.get(AttentionShape(S, B, N, G, D, window, q_SBND.dtype))
        if known is not None:
            name = known.name
        elif torch.is_grad_enabled():
            name = chooser.choose(S, B, N, G, D, window, q_SBND.dtype, q_SBND.device)
        else:
            name = "sdpa"  # prompts come in every length: not worth a measurement each
    if name not in BACKENDS:
        raise ConfigError(f"kernels.attention={name!r} is not a backend; choose among auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window)
