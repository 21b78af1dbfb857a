"""Causal attention with an optional sliding window, computed by the fastest of several kernels (backends).

A window includes the query's own token: with window=1 a token sees itself only, and window=S is full causal attention.
On CUDA `AttentionChooser` measures forward and backward of the kernels that implement a mask, and chooses the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.errors import ConfigError
from megascale.ops import dispatch
from megascale.ops.attention_backends import (
    BACKENDS,
    SLICE_CANDIDATES,
    SOFTCAP_BACKENDS,
    explain_missing_softcap,
    find_fallback,
    list_candidates,
    make_causal_mask,
    softmax_with_sinks,
)
from megascale.ops.attention_documents import (
    DOCUMENT_BACKENDS,
    DOCUMENT_CANDIDATES,
    SOFTCAP_DOCUMENT_BACKENDS,
    DocumentMask,
    check_document_backend,
    make_synthetic_boundaries,
)
from megascale.ops.attention_sinks import SINK_CANDIDATES, explain_missing_sinks, run_with_sinks
from megascale.ops.rope import split_qkv

# Maximum relative distance (2-norm, bfloat16) of a kernel's output from that of another kernel with the same mask.
MAX_KERNEL_DISTANCE = 2e-2
# Maximum relative distance of outputs and gradients from the reference. A wrong mask gives a much larger distance.
MAX_REFERENCE_DISTANCE = 5e-2
CHECKED_LENGTH = 512  # tokens of the samples on which kernels are compared with the reference
TIMED_RUNS = 5
WARM_UP_SECONDS = 0.3
# Number of GEMMs before a timed run. They take 2.5 ms on an H200, longer than the host needs to launch the run.
BUSY_GEMM_COUNT = 12


def attention_reference(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    window: int | None,
    documents: DocumentMask | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention` with an explicit mask in at least float32. Every backend is compared with this."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    q = q_SBND.to(wide).unflatten(2, (G, N // G))
    scores = torch.einsum("sbgnd,tbgd->bgnst", q, k_SBGD.to(wide)) * D**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = make_causal_mask(S, k_SBGD.shape[0], window, q_SBND.device)
    if documents is not None:
        keys = torch.arange(k_SBGD.shape[0], device=q_SBND.device)
        mask = (mask & (keys >= documents.starts_BS[:, -S:, None]))[:, None, None]  # [B, 1, 1, S, T]
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_N is None:
        weights = scores.softmax(-1)
    else:
        weights = softmax_with_sinks(scores, sinks_N.to(wide))
    return torch.einsum("bgnst,tbgd->sbgnd", weights, v_SBGD.to(wide)).reshape(S, B, N * D).to(q_SBND.dtype)


class AttentionShape(NamedTuple):
    """Shape and options of an attention, for which the fastest kernel is chosen.

    Attributes:
        S, B, N, G, D: queries, samples, query heads, key/value heads, and head size.
        window: None: full attention.
        max_documents: largest number of documents in a sample; 0: each sample is one document.
        softcap: None: unbounded scores.
        has_sinks: whether each head has a sink.
        key_count: number of keys if the S queries are the last tokens of a longer sequence; 0: S keys.
    """

    S: int
    B: int
    N: int
    G: int
    D: int
    window: int | None
    dtype: torch.dtype
    max_documents: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    key_count: int = 0

    def __str__(self) -> str:
        mask = "full" if self.window is None else f"window {self.window}"
        if self.key_count:
            mask += f", over {self.key_count} keys"
        if self.max_documents:
            mask += f", up to {self.max_documents} documents"
        if self.softcap is not None:
            mask += f", softcap {self.softcap:g}"
        if self.has_sinks:
            mask += ", sinks"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.S} x {self.B}, {self.N} heads ({self.G} kv) of {self.D}, {mask}, {dtype}"


@dataclass
class AttentionChoice:
    """Choice of a kernel for one shape.

    Attributes:
        name: name of the chosen backend.
        milliseconds: time of forward and backward by backend, for all backends that ran.
        refused: reason by backend, for all backends that did not run or were wrong.
    """

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names_by_time = sorted(self.milliseconds, key=self.milliseconds.__getitem__)
        results = [f"{name} {self.milliseconds[name]:.3f} ms" for name in names_by_time]
        results += [f"{name}: {reason}" for name, reason in self.refused.items()]
        if not results:
            return self.name
        return f"{self.name} ({'; '.join(results)})"


def measure_backends(
    shape: AttentionShape, device: torch.device, candidates: Sequence[str] | None = None
) -> AttentionChoice:
    """Run every backend that may support the shape. Return the fastest of those whose outputs agree.

    Without CUDA, or in types without fused kernels, return the fallback. Raises ConfigError inside a graph capture.

    Args:
        candidates: the backends to run; None: all that may support the shape, and the fallback if none does.
    """
    if device.type != "cuda" or shape.dtype not in (torch.bfloat16, torch.float16):
        return AttentionChoice(find_fallback(shape.softcap, shape.has_sinks))
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"attention for {shape} would be measured inside a CUDA graph capture; call "
            "AttentionChooser.choose for every shape before capturing"
        )
    background = _BackgroundGemms(device)
    background.warm_up()
    fallback = find_fallback(shape.softcap, shape.has_sinks)
    choice = AttentionChoice(fallback)
    if candidates is None:
        candidates = [*_list_backends(shape, fallback), fallback]
    expected: Tensor | None = None
    for name in candidates:
        if name == fallback and choice.milliseconds:
            break  # The fallback is slow, and its explicit mask may not fit in memory.
        try:
            check_mask(name, shape, device)
            milliseconds, out = _time_backend(name, shape, device, background)
        except Exception as error:  # A kernel may reject a shape with any exception.
            choice.refused[name] = _get_first_line(error)
            continue
        if expected is None:
            expected = out
        distance = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
        if distance <= MAX_KERNEL_DISTANCE:
            choice.milliseconds[name] = milliseconds
        else:
            first_name = next(iter(choice.milliseconds))
            choice.refused[name] = f"its output is {distance:.1e} away from {first_name}'s"
    if choice.milliseconds:
        choice.name = min(choice.milliseconds, key=choice.milliseconds.__getitem__)
    return choice


def _list_backends(shape: AttentionShape, fallback: str) -> list[str]:
    """Return the backends that may support the shape on CUDA, without the fallback."""
    if shape.has_sinks:
        has_documents = shape.max_documents > 0
        return [name for name in SINK_CANDIDATES if not explain_missing_sinks(name, shape.softcap, has_documents)]
    if shape.softcap is not None:
        return [name for name in SOFTCAP_BACKENDS if name != fallback]
    if shape.key_count:
        return list(SLICE_CANDIDATES)
    if shape.max_documents:
        return list(DOCUMENT_CANDIDATES)
    return list_candidates(shape.window)


class _BackgroundGemms:
    """GEMMs that keep a GPU busy while the host launches the kernels to be timed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self._y = torch.empty_like(self._x)

    def warm_up(self) -> None:
        """Run GEMMs until an idle GPU has raised its clock. Otherwise the first measured kernel would seem slow."""
        end = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < end:
            self.launch()
            torch.cuda.synchronize(self._device)

    def launch(self) -> None:
        """Launch a few milliseconds of work, so that the next kernels run without gaps, as in a CUDA graph."""
        for _ in range(BUSY_GEMM_COUNT):
            torch.mm(self._x, self._x, out=self._y)


def _get_first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type without a message."""
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


def _identity(x: Tensor) -> Tensor:
    return x


class AttentionChooser:
    """Choice of the fastest kernel for each shape. Each shape is measured once.

    Args:
        backend: value of kernels.attention: one backend for all shapes, or "auto".
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.choices: dict[AttentionShape, AttentionChoice] = {}
        self.measure: Callable[..., AttentionChoice] = measure_backends  # tests replace it

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
        max_documents: int = 0,
        softcap: float | None = None,
        has_sinks: bool = False,
        key_count: int = 0,
    ) -> str:
        """Return the name of the backend for a shape. The arguments are those of `AttentionShape`.

        The first call for a shape measures all backends, so it must precede graph captures.
        """
        if window is not None and window >= (key_count or S):
            window = None
        shape = AttentionShape(S, B, N, G, D, window, dtype, max_documents, softcap, has_sinks, key_count)
        if shape not in self.choices:
            # If the caller is recomputed in backward, its hooks must not see tensors that the measurement saves.
            with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
                if not self._adopt_from_fewer_documents(shape, torch.device(device)):
                    self.choices[shape] = self.measure(shape, torch.device(device))
                    dispatch.record_choice(f"attention {shape}", str(self.choices[shape]))
        return self.choices[shape].name

    def _adopt_from_fewer_documents(self, shape: AttentionShape, device: torch.device) -> bool:
        """Adopt the kernel of the same shape with fewer documents if it can run. Return whether one was adopted.

        Samples of held-out data may have more documents than those of training, for which all ranks have agreed on a
        kernel. If ranks measured again, they could choose different kernels.
        """
        for chosen_shape, choice in self.choices.items():
            is_same_shape = chosen_shape._replace(max_documents=shape.max_documents) == shape
            has_fewer_documents = 0 < chosen_shape.max_documents < shape.max_documents
            if not is_same_shape or not has_fewer_documents:
                continue
            if not self.explain_refusal(choice.name, shape, device):
                self.adopt(shape, choice.name, f"as for up to {chosen_shape.max_documents} documents")
                return True
        return False

    def adopt(self, shape: AttentionShape, name: str, reason: str = "") -> None:
        """Set the kernel of a shape, on which all ranks have agreed. The record of operators shows `reason`."""
        self.choices[shape] = AttentionChoice(name)
        dispatch.record_choice(f"attention {shape}", f"{name} ({reason})" if reason else name)

    def explain_refusal(self, name: str, shape: AttentionShape, device: torch.device) -> str:
        """Return why a backend cannot run a shape on this process's device, or "" if it can."""
        if name == find_fallback(shape.softcap, shape.has_sinks):
            return ""
        if shape.has_sinks:
            reason = explain_missing_sinks(name, shape.softcap, shape.max_documents > 0)
            if reason:
                return reason
        elif shape.softcap is not None:
            reason = explain_missing_softcap(name, shape.softcap)
            if reason:
                return reason
        elif name not in BACKENDS and name not in DOCUMENT_BACKENDS:
            return "this version has no such kernel"
        try:
            check_mask(name, shape, device)
            _run_both_passes(name, shape, *_make_inputs(shape, device))
        except Exception as error:  # A kernel may reject a shape with any exception.
            return _get_first_line(error)
        return ""

    def describe(self) -> list[str]:
        """Return one line per shape: the choice, the measurements, and why other kernels could not run."""
        return [f"attention {shape}: {choice}" for shape, choice in self.choices.items()]


def _make_inputs(shape: AttentionShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random QKV projection [keys, B, (N + 2G) D], and a gradient of the result [S, B, N D]."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.key_count or shape.S, shape.B, (shape.N + 2 * shape.G) * shape.D)
    qkv = torch.randn(sizes, device=device, generator=generator).to(shape.dtype).requires_grad_()
    return qkv, torch.randn(shape.S, shape.B, shape.N * shape.D, device=device, generator=generator).to(shape.dtype)


def _split_inputs(shape: AttentionShape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries of the last S tokens, and the keys and values of all tokens."""
    q, k, v = split_qkv(qkv, shape.N, shape.G)
    if shape.key_count:
        q = q[len(q) - shape.S :]
    return q, k, v


def _make_documents(shape: AttentionShape, device: torch.device) -> DocumentMask | None:
    """Return synthetic documents of the shape, or None if a sample is one document."""
    if not shape.max_documents:
        return None
    return DocumentMask.from_boundaries(
        make_synthetic_boundaries(shape.S, shape.B, shape.max_documents).to(device), shape.S
    )


def run_backend(
    name: str,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask | None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Run the kernel `name`; see `attention`.

    Raises ConfigError if the kernel does not support documents, a softcap or sinks that are given.
    """
    if sinks_N is not None:
        return run_with_sinks(name, q_SBND, k_SBGD, v_SBGD, window, documents, softcap, sinks_N)
    if softcap is not None:
        reason = explain_missing_softcap(name, softcap)
        if reason:
            raise ConfigError(reason)
        if documents is None:
            return SOFTCAP_BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window, softcap)
        return SOFTCAP_DOCUMENT_BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window, documents, softcap)
    if documents is None and name not in BACKENDS:
        raise ConfigError(
            f"kernels.attention={name!r} computes attention within documents only; set --data.document_mask=true, or "
            "--kernels.attention=auto"
        )
    if documents is None:
        return BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window)
    check_document_backend(name)
    return DOCUMENT_BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window, documents)


def _make_sinks(shape: AttentionShape, device: torch.device) -> Tensor | None:
    """Return a different sink for each head, of the size of typical scores, or None without sinks."""
    if not shape.has_sinks:
        return None
    return torch.linspace(-2, 4, shape.N, device=device).to(shape.dtype).requires_grad_()


def check_mask(name: str, shape: AttentionShape, device: torch.device) -> None:
    """Raise NotImplementedError if output or gradients of a kernel differ from the reference on short samples.

    Only shapes with documents, sinks or more keys than queries are checked.
    """
    if not shape.max_documents and not shape.has_sinks and not shape.key_count:
        return
    if shape.key_count:
        length = min(shape.S, CHECKED_LENGTH)
        key_count = length + min(shape.key_count - shape.S, CHECKED_LENGTH)
        window = None if shape.window is None else min(shape.window, key_count // 2)
        shape = shape._replace(S=length, key_count=key_count, window=window)
    shape = shape._replace(S=min(shape.S, CHECKED_LENGTH), max_documents=min(shape.max_documents, CHECKED_LENGTH))
    documents = _make_documents(shape, device)
    qkv, upstream = _make_inputs(shape, device)
    sinks = _make_sinks(shape, device)
    inputs = [qkv] if sinks is None else [qkv, sinks]
    results = []
    with torch.enable_grad():
        q, k, v = _split_inputs(shape, qkv)
        for out in (
            attention_reference(
                q, k, v, window=shape.window, documents=documents, softcap=shape.softcap, sinks_N=sinks
            ),
            run_backend(name, q, k, v, shape.window, documents, shape.softcap, sinks),
        ):
            results.append((out.detach(), *torch.autograd.grad(out, inputs, upstream, retain_graph=True)))
    if shape.max_documents:
        feature = "within documents"
    elif shape.has_sinks:
        feature = "with sinks"
    else:
        feature = "of a slice"
    names = ("output", "gradient", "gradient of the sinks")[: len(results[0])]
    for tensor_name, expected, actual in zip(names, *results, strict=True):
        distance = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
        # NaN must not pass.
        if not distance <= MAX_REFERENCE_DISTANCE:
            raise NotImplementedError(f"its {tensor_name} {feature} is {distance:.1e} away from the reference's")


def _run_both_passes(name: str, shape: AttentionShape, qkv: Tensor, upstream: Tensor) -> Tensor:
    """Run forward and backward of a kernel and of the QKV split. Return the output."""
    documents = _make_documents(shape, qkv.device)
    sinks = _make_sinks(shape, qkv.device)
    inputs = [qkv] if sinks is None else [qkv, sinks]
    with torch.enable_grad():
        q, k, v = _split_inputs(shape, qkv)
        out = run_backend(name, q, k, v, shape.window, documents, shape.softcap, sinks)
        torch.autograd.grad(out, inputs, upstream)
    return out.detach()


def _time_backend(
    name: str, shape: AttentionShape, device: torch.device, background: _BackgroundGemms
) -> tuple[float, Tensor]:
    """Return the shortest time of forward and backward in milliseconds, and the output."""
    qkv, upstream = _make_inputs(shape, device)
    # The first runs compile kernels and are not timed.
    for _ in range(2):
        background.launch()
        out = _run_both_passes(name, shape, qkv, upstream)
        torch.cuda.synchronize(device)
    best_milliseconds = float("inf")
    for _ in range(TIMED_RUNS):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        background.launch()
        start.record()
        out = _run_both_passes(name, shape, qkv, upstream)
        stop.record()
        stop.synchronize()
        best_milliseconds = min(best_milliseconds, start.elapsed_time(stop))
    return best_milliseconds, out


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    window: int | None,
    softcap: float | None = None,
    backend: str = "auto",
    chooser: AttentionChooser | None = None,
    documents: DocumentMask | None = None,
    sinks_N: Tensor | None = None,
    is_slice: bool = False,
) -> Tensor:
    """Compute causal attention. Return the output [queries, batch, heads x head size].

    q, k and v may be views of the QKV projection, which are read in place. With fewer queries than keys the last query
    is at the position of the last key. Raises ConfigError for an unknown backend, and for a backend that does not
    support documents, a softcap or sinks that are given.

    Args:
        q_SBND: [queries, batch, heads, head size].
        k_SBGD, v_SBGD: [keys, batch, groups, head size]. The number of heads is a multiple of the number of groups.
        window: number of tokens that a query sees, itself included; None: all tokens before it.
        softcap: bound c, which replaces scores x by c tanh(x / c); None: unbounded scores.
        backend: name of a backend; "auto": the chooser's backend.
        chooser: kernels.attention and its measurements; None: a new chooser.
        documents: documents of the samples; queries see keys of their own document. None: a sample is one document.
        sinks_N: one logit per head that takes part in the softmax without a value; None: no sinks.
        is_slice: whether fewer queries than keys are a slice of a training sequence, for which kernels are measured.
            In generation the fallback runs.
    """
    S, B, N, D = q_SBND.shape
    T, G = k_SBGD.shape[0], k_SBGD.shape[2]
    if window is not None and window >= T:
        window = None
    chooser = chooser or AttentionChooser()
    has_sinks = sinks_N is not None
    name = backend
    if backend == "auto":
        name = chooser.backend
    key_count = T if S != T else 0
    if key_count and not is_slice:
        # The training kernels have no mask for generation with a cache.
        name = find_fallback(softcap, has_sinks)
    elif name == "auto" and dispatch.get_mode() == "reference":
        name = find_fallback(softcap, has_sinks)
    elif name == "auto":
        max_documents = 0 if documents is None else documents.max_documents
        shape = AttentionShape(S, B, N, G, D, window, q_SBND.dtype, max_documents, softcap, has_sinks, key_count)
        choice = chooser.choices.get(shape)
        if choice is not None:
            name = choice.name
        elif torch.is_grad_enabled():
            name = chooser.choose(
                S,
                B,
                N,
                G,
                D,
                window,
                dtype=q_SBND.dtype,
                device=q_SBND.device,
                max_documents=max_documents,
                softcap=softcap,
                has_sinks=has_sinks,
                key_count=key_count,
            )
        else:
            # Prompts have any length, and a measurement for each length would take too long.
            name = find_fallback(softcap, has_sinks)
    if documents is not None or softcap is not None or has_sinks:
        return run_backend(name, q_SBND, k_SBGD, v_SBGD, window, documents, softcap, sinks_N)
    if name not in BACKENDS:
        raise ConfigError(f"kernels.attention={name!r} is not a backend; choose among auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window)
