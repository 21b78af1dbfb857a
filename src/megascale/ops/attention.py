"""Causal attention with an optional sliding window, over views of the fused QKV output, by the fastest kernel.

A window counts the token itself: window=1 sees only itself, window=S is full causal attention. On CUDA
`AttentionChooser` measures the kernels that implement the mask, forward and backward, and chooses the fastest.
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
from megascale.ops.attention_backends import (
    BACKENDS,
    SLICE_CANDIDATES,
    SOFTCAP_BACKENDS,
    candidates,
    causal_mask,
    explain_missing_softcap,
    find_fallback,
    softmax_with_sinks,
)
from megascale.ops.attention_documents import (
    DOCUMENT_BACKENDS,
    DOCUMENT_CANDIDATES,
    SOFTCAP_DOCUMENT_BACKENDS,
    DocumentMask,
    check_document_backend,
    synthetic_boundaries,
)
from megascale.ops.attention_sinks import SINK_CANDIDATES, explain_missing_sinks, run_with_sinks
from megascale.ops.rope import split_qkv

AGREEMENT = 2e-2  # norm-wise, in bfloat16, between kernels of the same mask
REPEATS = 5
WARM_UP_SECONDS = 0.3
BUSY_GEMMS = 12  # 2.5 ms on an H200: longer than launching an attention both ways takes
DOCUMENT_AGREEMENT = 5e-2  # norm-wise, in bfloat16, of output and gradients with the reference: a wrong mask is far off
CHECKED_LENGTH = 512  # tokens of the samples on which kernels are compared with the reference


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
    """Compute softmax over an explicit mask, in at least float32: the reference of every backend."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    q = q_SBND.to(wide).unflatten(2, (G, N // G))
    scores = torch.einsum("sbgnd,tbgd->bgnst", q, k_SBGD.to(wide)) * D**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = causal_mask(S, k_SBGD.shape[0], window, q_SBND.device)
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
    """The shape that a choice depends on.

    window is None for full attention. documents is the largest number of documents in a sample; 0: a sample is one
    document. softcap is None for unbounded scores. has_sinks: whether each head has a sink. keys is the number of keys
    if the S queries are the last tokens of a longer sequence; 0: S.
    """

    S: int
    B: int
    N: int
    G: int
    D: int
    window: int | None
    dtype: torch.dtype
    documents: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    keys: int = 0

    def __str__(self) -> str:
        mask = "full" if self.window is None else f"window {self.window}"
        if self.keys:
            mask += f", over {self.keys} keys"
        if self.documents:
            mask += f", up to {self.documents} documents"
        if self.softcap is not None:
            mask += f", softcap {self.softcap:g}"
        if self.has_sinks:
            mask += ", sinks"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.S} x {self.B}, {self.N} heads ({self.G} kv) of {self.D}, {mask}, {kind}"


@dataclass
class AttentionChoice:
    """The kernel for one shape, milliseconds (forward + backward) of all that ran, and why others did not run."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name} {ms:.3f} ms" for name, ms in sorted(self.milliseconds.items(), key=lambda item: item[1])]
        parts += [f"{name}: {reason}" for name, reason in self.refused.items()]
        return f"{self.name} ({'; '.join(parts)})" if parts else self.name


def measure(shape: AttentionShape, device: torch.device) -> AttentionChoice:
    """Run every backend that may support the shape; returns the fastest of those that agree."""
    if device.type != "cuda" or shape.dtype not in (torch.bfloat16, torch.float16):
        return AttentionChoice(find_fallback(shape.softcap, shape.has_sinks))
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"attention for {shape} would be measured inside a CUDA graph capture; call "
            "AttentionChooser.choose for every shape before capturing"
        )
    load = _GpuLoad(device)
    load.warm_up()
    fallback = find_fallback(shape.softcap, shape.has_sinks)
    choice = AttentionChoice(fallback)
    names = list(DOCUMENT_CANDIDATES) if shape.documents else candidates(shape.window)
    if shape.keys:
        names = list(SLICE_CANDIDATES)
    if shape.softcap is not None:
        names = [name for name in SOFTCAP_BACKENDS if name != fallback]
    if shape.has_sinks:
        names = [
            name for name in SINK_CANDIDATES if not explain_missing_sinks(name, shape.softcap, shape.documents > 0)
        ]
    expected: Tensor | None = None
    for name in (*names, fallback):
        if name == fallback and choice.milliseconds:
            break  # the last resort: it is slow, and its explicit mask may not even fit
        try:
            check_mask(name, shape, device)
            milliseconds, out = _time(name, shape, device, load)
        except Exception as error:  # a kernel may reject a shape with any exception
            choice.refused[name] = _first_line(error)
            continue
        if expected is None:
            expected = out
        distance = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
        if distance <= AGREEMENT:
            choice.milliseconds[name] = milliseconds
        else:
            choice.refused[name] = f"its output is {distance:.1e} away from {next(iter(choice.milliseconds))}'s"
    if choice.milliseconds:
        choice.name = min(choice.milliseconds, key=choice.milliseconds.__getitem__)
    return choice


class _GpuLoad:
    """GEMMs that keep a GPU busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self._y = torch.empty_like(self._x)

    def warm_up(self) -> None:
        """Raise the clock of an idle GPU, without which the first kernel would look slow."""
        end = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < end:
            self.launch()
            torch.cuda.synchronize(self._device)

    def launch(self) -> None:
        """Launch milliseconds of work, so that later launches follow without the host's gaps, as in a CUDA graph."""
        for _ in range(BUSY_GEMMS):
            torch.mm(self._x, self._x, out=self._y)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160] or type(error).__name__


def _identity(x: Tensor) -> Tensor:
    return x


class AttentionChooser:
    """Chooses the fastest kernel for each shape by measuring once.

    Args:
        backend: kernels.attention: one backend for all shapes, or "auto".
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
        documents: int = 0,
        softcap: float | None = None,
        has_sinks: bool = False,
        keys: int = 0,
    ) -> str:
        """Return the backend for a shape, measured at the first call: at start-up, before any graph capture.

        On CPU, and in types that no fused attention supports, it is torch's own choice.

        Args:
            S, B, N, G, D: tokens, samples, query heads, key/value heads, and width of a head.
            documents: largest number of documents in a sample; 0: a sample is one document.
            softcap: bound of the scores, if they have one.
            has_sinks: whether each head has a sink.
            keys: keys of a slice's queries; 0: S.
        """
        if window is not None and window >= (keys or S):
            window = None
        shape = AttentionShape(S, B, N, G, D, window, dtype, documents, softcap, has_sinks, keys)
        if shape not in self.choices:
            # The caller may be recomputed in backward: its hooks must not see the tensors saved while measuring.
            with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
                if not self._adopt_from_fewer_documents(shape, torch.device(device)):
                    self.choices[shape] = self.measure(shape, torch.device(device))
                    dispatch.note(f"attention {shape}", str(self.choices[shape]))
        return self.choices[shape].name

    def _adopt_from_fewer_documents(self, shape: AttentionShape, device: torch.device) -> bool:
        """Adopt the kernel of the same shape with fewer documents, and return whether there is one that can run.

        Samples of held-out data may have more documents than those of training, for which all ranks have agreed on a
        kernel. Ranks that measured again could choose different kernels.
        """
        for chosen_shape, choice in self.choices.items():
            has_fewer_documents = 0 < chosen_shape.documents < shape.documents
            if chosen_shape._replace(documents=shape.documents) != shape or not has_fewer_documents:
                continue
            if not self.explain_refusal(choice.name, shape, device):
                self.adopt(shape, choice.name, f"as for up to {chosen_shape.documents} documents")
                return True
        return False

    def adopt(self, shape: AttentionShape, name: str, reason: str = "") -> None:
        """Adopt the kernel that all ranks have agreed on; `reason` is for the record of operators."""
        self.choices[shape] = AttentionChoice(name)
        dispatch.note(f"attention {shape}", f"{name} ({reason})" if reason else name)

    def explain_refusal(self, name: str, shape: AttentionShape, device: torch.device) -> str:
        """Return why a backend cannot run a shape on this process's device, or "" if it can."""
        if name == find_fallback(shape.softcap, shape.has_sinks):
            return ""
        if shape.has_sinks:
            reason = explain_missing_sinks(name, shape.softcap, shape.documents > 0)
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
            _run(name, shape, *_inputs(shape, device))
        except Exception as error:  # Backends raise errors of any type, see `measure`.
            return _first_line(error)
        return ""

    def describe(self) -> list[str]:
        """Return a line per shape: the choice, the measurements, and why other kernels could not run."""
        return [f"attention {shape}: {choice}" for shape, choice in self.choices.items()]


def _inputs(shape: AttentionShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random fused QKV output of all keys' tokens, and the gradient of the result."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.keys or shape.S, shape.B, (shape.N + 2 * shape.G) * shape.D)
    qkv = torch.randn(sizes, device=device, generator=generator).to(shape.dtype).requires_grad_()
    return qkv, torch.randn(shape.S, shape.B, shape.N * shape.D, device=device, generator=generator).to(shape.dtype)


def _split_inputs(shape: AttentionShape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, which are those of the last tokens, and all keys and values."""
    q, k, v = split_qkv(qkv, shape.N, shape.G)
    return q[len(q) - shape.S :] if shape.keys else q, k, v


def _make_documents(shape: AttentionShape, device: torch.device) -> DocumentMask | None:
    """Return synthetic documents of the shape, or None if a sample is one document."""
    if not shape.documents:
        return None
    return DocumentMask.from_boundaries(synthetic_boundaries(shape.S, shape.B, shape.documents).to(device), shape.S)


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
    """Run a kernel by name. Raises ConfigError if it cannot keep to the documents, bound the scores or have sinks."""
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
    """Return different sinks of the shape's heads, as large as scores, or None without sinks."""
    if not shape.has_sinks:
        return None
    return torch.linspace(-2, 4, shape.N, device=device).to(shape.dtype).requires_grad_()


def check_mask(name: str, shape: AttentionShape, device: torch.device) -> None:
    """Raise NotImplementedError if a kernel's output or gradients differ from the reference's, on short samples.

    Shapes without documents, without sinks and with as many keys as queries are not checked.
    """
    if not shape.documents and not shape.has_sinks and not shape.keys:
        return
    if shape.keys:
        length = min(shape.S, CHECKED_LENGTH)
        keys = length + min(shape.keys - shape.S, CHECKED_LENGTH)
        window = None if shape.window is None else min(shape.window, keys // 2)
        shape = shape._replace(S=length, keys=keys, window=window)
    shape = shape._replace(S=min(shape.S, CHECKED_LENGTH), documents=min(shape.documents, CHECKED_LENGTH))
    documents = _make_documents(shape, device)
    qkv, upstream = _inputs(shape, device)
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
    if shape.documents:
        kind = "within documents"
    else:
        kind = "with sinks" if shape.has_sinks else "of a slice"
    parts = ("output", "gradient", "gradient of the sinks")[: len(results[0])]
    for part, expected, actual in zip(parts, *results, strict=True):
        distance = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
        if not distance <= DOCUMENT_AGREEMENT:
            raise NotImplementedError(f"its {part} {kind} is {distance:.1e} away from the reference's")


def _run(name: str, shape: AttentionShape, qkv: Tensor, upstream: Tensor) -> Tensor:
    """Run forward and backward through the QKV split; returns the output."""
    documents = _make_documents(shape, qkv.device)
    sinks = _make_sinks(shape, qkv.device)
    inputs = [qkv] if sinks is None else [qkv, sinks]
    with torch.enable_grad():
        q, k, v = _split_inputs(shape, qkv)
        out = run_backend(name, q, k, v, shape.window, documents, shape.softcap, sinks)
        torch.autograd.grad(out, inputs, upstream)
    return out.detach()


def _time(name: str, shape: AttentionShape, device: torch.device, load: _GpuLoad) -> tuple[float, Tensor]:
    """Return the GPU's best milliseconds for forward + backward through the QKV split, and the output."""
    qkv, upstream = _inputs(shape, device)
    best, out = float("inf"), upstream
    for repeat in range(2 + REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        load.launch()
        start.record()
        out = _run(name, shape, qkv, upstream)
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
    softcap: float | None = None,
    backend: str = "auto",
    chooser: AttentionChooser | None = None,
    documents: DocumentMask | None = None,
    sinks_N: Tensor | None = None,
    is_slice: bool = False,
) -> Tensor:
    """Compute causal attention; returns [S, B, N*D].

    Views of the fused QKV output are read in place. With fewer queries than keys (generation) the last query is at the
    last key. Raises ConfigError for an unknown backend, and for one that cannot keep to the documents.

    Args:
        q_SBND: [queries, batch, heads, head size].
        k_SBGD, v_SBGD: [keys, batch, groups, head size], heads a multiple of groups.
        window: tokens that a query sees, itself included; None for all before it.
        softcap: bound c of the scores x, as c tanh(x / c); None for none.
        backend: "auto" for the chooser's, else a name of `BACKENDS`.
        chooser: holds kernels.attention and the measurements; default: a new one.
        documents: documents of the samples, which attention does not leave; None: a sample is one document.
        sinks_N: a logit per head that takes part in the softmax and has no value; None: none.
        is_slice: whether fewer queries than keys are a slice of training, for which the chooser has a kernel.
    """
    S, B, N, D = q_SBND.shape
    T, G = k_SBGD.shape[0], k_SBGD.shape[2]
    if window is not None and window >= T:
        window = None
    chooser = chooser or AttentionChooser()
    has_sinks = sinks_N is not None
    name = chooser.backend if backend == "auto" else backend
    keys = T if S != T else 0
    if keys and not is_slice:
        # Generation with a cache: the training kernels have no mask for it.
        name = find_fallback(softcap, has_sinks)
    elif name == "auto" and dispatch.mode() == "reference":
        name = find_fallback(softcap, has_sinks)
    elif name == "auto":
        count = 0 if documents is None else documents.max_documents
        shape = AttentionShape(S, B, N, G, D, window, q_SBND.dtype, count, softcap, has_sinks, keys)
        choice = chooser.choices.get(shape)
        if choice is not None:
            name = choice.name
        elif torch.is_grad_enabled():
            name = chooser.choose(S, B, N, G, D, window, q_SBND.dtype, q_SBND.device, count, softcap, has_sinks, keys)
        else:
            name = find_fallback(
                softcap, has_sinks
            )  # prompts come in every length, which are not worth a measurement each
    if documents is not None or softcap is not None or has_sinks:
        return run_backend(name, q_SBND, k_SBGD, v_SBGD, window, documents, softcap, sinks_N)
    if name not in BACKENDS:
        raise ConfigError(f"kernels.attention={name!r} is not a backend; choose among auto, {', '.join(BACKENDS)}")
    return BACKENDS[name](q_SBND, k_SBGD, v_SBGD, window)
