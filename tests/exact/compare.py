"""Norm-wise comparison of what a layout told with what one process told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from tests.exact.training import Boxed, RankReport, boxes_of

TOLERANCE = 1e-10


def join_boxes(boxes: Iterable[Boxed]) -> dict[str, np.ndarray]:
    """Logical tensors from boxes that one process told; each element must be told once."""
    tensors: dict[str, np.ndarray] = {}
    for box in boxes:
        target = tensors.setdefault(box.name, np.full(box.shape, np.nan))[_where(box)]
        assert np.isnan(target).all(), f"{box.name} at {box.offsets} is told twice"
        target[...] = box.values
    for name, tensor in tensors.items():
        assert not np.isnan(tensor).any(), f"{name} is not whole"
    return tensors


def differences(reference: RankReport, report: list[RankReport], model: ModelConfig) -> dict[str, float]:
    """Relative 2-norm of the difference of everything, by name.

    Replicas all count: a tensor that four ranks hold must be right on each. Raises AssertionError if an element is
    told by no rank, or a tensor is unknown to the reference.
    """
    result: dict[str, float] = {}
    for step, (loss, norm) in enumerate(zip(reference.losses, reference.norms, strict=True)):
        for rank, item in enumerate(report):
            for subject, is_, should in (("loss", item.losses[step], loss), ("norm", item.norms[step], norm)):
                # A batch may have no loss weight at all: its loss is 0 exactly.
                result[f"step {step + 1} {subject} on rank {rank}"] = abs(is_ - should) / (abs(should) or 1.0)
    for (kind, boxes), (_, one_process) in zip(boxes_of(report), boxes_of([reference]), strict=True):
        expected = join_boxes(one_process)
        observed = {name: np.zeros(tensor.shape, bool) for name, tensor in expected.items()}
        squares = dict.fromkeys(expected, 0.0)
        ignored = {name: zero_by_mathematics(model, name, tensor.shape) for name, tensor in expected.items()}
        for box in boxes:
            where = _where(box)
            separate = np.where(ignored[box.name][where], 0.0, box.values - expected[box.name][where])
            squares[box.name] += float(np.square(separate).sum())
            observed[box.name][where] = True
        for name, tensor in expected.items():
            assert observed[name].all(), f"{kind} {name}: {np.sum(~observed[name])} elements are on no rank"
            scale = float(np.linalg.norm(np.where(ignored[name], 0.0, tensor)))
            # Where all is zero (an excluded tensor), equal means exactly equal.
            result[f"{kind} {name}"] = squares[name] ** 0.5 / scale if scale else squares[name] ** 0.5
    return result


def assert_equal(reference: RankReport, report: list[RankReport], model: ModelConfig) -> None:
    """Everything within TOLERANCE, or an AssertionError that lists the worst."""
    result = differences(reference, report, model)
    bad = {name: value for name, value in result.items() if not value <= TOLERANCE}
    worst = sorted(bad.items(), key=lambda item: -item[1])[:12]
    assert not bad, f"{len(bad)} of {len(result)} differ: " + ", ".join(f"{name} {value:.1e}" for name, value in worst)


def zero_by_mathematics(model: ModelConfig, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of a logical tensor whose gradient is zero for all data, so that only rounding is left of it.

    The bias of keys, where positions do not rotate it: it adds the same to all scores of a query, and softmax does
    not see that. With rotary positions on a part of each head, the rest of the head.
    """
    if not name.endswith(("attention.key.bias", "attention.key_norm.bias")):
        return np.zeros(shape, bool)
    mixer = resolve_layers(model)[int(name.partition("layers.")[2].split(".")[0])].mixer
    turned = 0 if mixer.rope is None else mixer.rope.width
    is_zero = np.arange(mixer.head_size) >= turned
    if not mixer.qk_norm:
        return np.tile(is_zero, mixer.kv_heads)
    # A norm of keys changes what their projection adds; the norm's own bias is what adds the same to all scores.
    return is_zero if "key_norm" in name else np.zeros(shape, bool)


def _where(box: Boxed) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))
