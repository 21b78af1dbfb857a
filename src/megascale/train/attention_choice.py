"""Choice of a run's attention kernels: every rank measures them, all ranks agree, and the run keeps the choice.

Ranks with the same kind of device run the same kernel for the same shape. Of the kernels that all these ranks can run,
they choose the one whose time on the slowest rank is the shortest. The choice is saved in RUN/kernels.json and in every
checkpoint, since another kernel rounds differently. A run that resumes with the same kernels continues bit for bit (on
GPUs only with kernels.deterministic).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint.format import step_folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config
from megascale.core import strict_json
from megascale.core.head_exchange import count_head_parts, list_gathered_keys, share_heads
from megascale.core.inventory import count_distinct_layers
from megascale.core.layer_spec import AttentionSpec
from megascale.core.untrusted_files import read_small_text
from megascale.errors import ConfigError, MegascaleError
from megascale.ops import dispatch
from megascale.ops.attention import AttentionChooser, AttentionShape
from megascale.train.rank_info import find_device_kind

FILE = "kernels.json"
# In this module a "kind" is a kind of device, such as NVIDIA H100, and a "shape" as a key is the text of an
# AttentionShape. Ranks send these types to each other.
Choices = dict[str, dict[str, str]]  # kind -> shape -> name of the kernel
Decision = tuple[str, str]  # name of the kernel, and the reason for it
Decisions = dict[str, dict[str, Decision]]  # kind -> shape -> decision
# (milliseconds by name of each kernel that runs, reason by name of each kernel that does not)
Measurement = tuple[dict[str, float], dict[str, str]]
RankMeasurement = tuple[str, dict[str, Measurement]]  # (kind of a rank's device, shape -> measurement)


def list_shapes(
    config: Config, tensor: int, dtype: torch.dtype, documents: int = 0, context: int = 1
) -> list[AttentionShape]:
    """Return every attention shape of training, on any pipeline stage.

    Args:
        tensor: tensor-parallel size.
        documents: largest number of documents in a sample; 0: a sample is one document.
        context: number of ranks that divide the tokens of a sequence, and in attention its heads. A layer that gathers
            keys instead of dividing heads has the shapes of all ranks' slices. With documents, only one kernel computes
            such a layer, and its shapes are left out.
    """
    model, S = config.model, config.model.sequence_length
    shapes: dict[AttentionShape, None] = {}
    for layer, _ in count_distinct_layers(model):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            continue
        window = None if mixer.window is None or mixer.window >= S else mixer.window
        share = share_heads(mixer.heads // tensor, mixer.kv_heads // tensor, context)
        if share.gathers_keys and documents:
            continue
        parts = 1 if mixer.has_sinks else count_head_parts(share, config.exchanges_heads_in_parts)
        shape = AttentionShape(
            S=S,
            B=config.train.micro_batch,
            N=share.heads // parts,
            G=share.kv_heads // parts,
            D=mixer.head_size,
            window=window,
            dtype=dtype,
            max_documents=documents,
            softcap=mixer.softcap,
            has_sinks=mixer.has_sinks,
        )
        if not share.gathers_keys:
            shapes[shape] = None
            continue
        query_count = S // context
        for key_count in list_gathered_keys(S, context, window):
            slice_shape = shape._replace(S=query_count)
            if window is None or window >= key_count:
                slice_shape = slice_shape._replace(window=None)
            # A key count of 0 stands for as many keys as queries.
            slice_shape = slice_shape._replace(key_count=key_count if key_count > query_count else 0)
            shapes[slice_shape] = None
    return list(shapes)


def agree_on_kernels(
    config: Config,
    tensor: int,
    dtype: torch.dtype,
    device: torch.device,
    earlier_choices: Choices | None,
    chooser: AttentionChooser,
    documents: int = 0,
    context: int = 1,
    known: Mapping[str, Measurement] | None = None,
) -> tuple[Choices, dict[str, str]]:
    """Agree on attention kernels, collectively over the default group, and set them in `chooser`.

    Args:
        tensor: tensor-parallel size.
        earlier_choices: choices of earlier starts. Those passed on rank 0 count.
        documents: largest number of documents in a sample; 0: a sample is one document.
        context: number of ranks that divide the tokens of a sequence.
        known: measurements of this rank by shape, which are not repeated.

    Returns:
        All choices of the run, and start-up lines by name about kinds of devices other than this rank's.

    Raises ConfigError if kernels.attention names a kernel that cannot compute one of the shapes on this device.
    """
    if dispatch.get_mode() == "reference":
        return earlier_choices or {}, {}
    shapes = list_shapes(config, tensor, dtype, documents, context)
    if config.kernels.attention != "auto":
        _check_named_kernel(config.kernels.attention, shapes, device, chooser)
        return earlier_choices or {}, {}
    peers = Peers()
    choices = peers.broadcast(earlier_choices or {}, Choices)
    kind = find_device_kind(device)
    kind_choices = choices.get(kind, {})
    # Earlier choices may not run here any more, for example with another torch.
    refusals = {}  # why this rank cannot run the earlier choice, by shape; None if it can
    for shape in shapes:
        name = kind_choices.get(str(shape))
        if name is not None:
            refusals[str(shape)] = chooser.explain_refusal(name, shape, device)
    refusals_by_rank = peers.gather((kind, refusals), tuple[str, dict[str, str | None]])
    unavailable = peers.broadcast(_find_unavailable_kernels(refusals_by_rank), Choices)
    # Measure the shapes without a choice that runs.
    measured: dict[str, Measurement] = {}
    for shape in shapes:
        if str(shape) not in kind_choices or str(shape) in unavailable.get(kind, {}):
            if known is not None and str(shape) in known:
                measured[str(shape)] = known[str(shape)]
            else:
                measured[str(shape)] = measure_shape(chooser, shape, device)
    if measured and device.type == "cuda":
        torch.cuda.empty_cache()  # the measurement's memory must not lie between the engine's buffers
    rank_measurements = peers.gather((kind, measured), RankMeasurement)
    decisions: Decisions = peers.broadcast(decide_kernels(rank_measurements, choices, unavailable), Decisions)
    for shape in shapes:
        chooser.adopt(shape, *decisions[kind][str(shape)])
    descriptions = {}
    for decided_kind, kind_decisions in decisions.items():
        names_by_shape = choices.setdefault(decided_kind, {})
        for shape_text, (name, reason) in kind_decisions.items():
            names_by_shape[shape_text] = name
            if decided_kind != kind:
                descriptions[f"attention {shape_text} on {decided_kind}"] = f"{name} ({reason})"
    return choices, descriptions


def measure_shape(
    chooser: AttentionChooser, shape: AttentionShape, device: torch.device, candidates: Sequence[str] | None = None
) -> Measurement:
    """Return the times of a shape's kernels, or of `candidates`. Kernels that are not measured have time 0."""
    if candidates is None:
        choice = chooser.measure(shape, device)
    else:
        choice = chooser.measure(shape, device, candidates)
    return choice.milliseconds or {choice.name: 0.0}, choice.refused


def _check_named_kernel(
    name: str, shapes: list[AttentionShape], device: torch.device, chooser: AttentionChooser
) -> None:
    """Raise ConfigError if the kernel that kernels.attention names cannot compute one of the shapes."""
    for shape in shapes:
        reason = chooser.explain_refusal(name, shape, device)
        if reason:
            if "--kernels.attention=" in reason:
                remedy = ""
            else:
                remedy = "; set --kernels.attention=auto"
            raise ConfigError(f"attention {shape} cannot be computed by {name!r} on {device.type}: {reason}{remedy}")


def _find_unavailable_kernels(refusals_by_rank: list[tuple[str, dict[str, str | None]]]) -> dict[str, dict[str, str]]:
    """Return kind -> shape -> why the earlier choice cannot run any more; shapes whose choice still runs are absent.

    Args:
        refusals_by_rank: for each rank its kind, and shape -> why it cannot run the earlier choice, None if it can.
    """
    unavailable: dict[str, dict[str, str]] = {}
    for rank, (kind, refusals) in enumerate(refusals_by_rank):
        for shape, reason in refusals.items():
            if reason:
                unavailable.setdefault(kind, {}).setdefault(shape, f"rank {rank}: {reason}")
    return unavailable


def decide_kernels(
    rank_measurements: list[RankMeasurement], choices: Choices, unavailable: Mapping[str, Mapping[str, str]]
) -> Decisions:
    """Return kind -> shape -> the kernel for all devices of that kind, and the reason for it.

    Args:
        rank_measurements: one for each rank.
        choices: choices of earlier starts, which are kept.
        unavailable: kind -> shape -> why an earlier choice must be replaced.
    """
    # By kind: the measurements of each rank with that kind of device.
    measured_by_kind: dict[str, list[dict[str, Measurement]]] = {}
    for kind, measured in rank_measurements:
        measured_by_kind.setdefault(kind, []).append(measured)
    decisions: Decisions = {}
    for kind, measured_by_rank in measured_by_kind.items():
        kind_choices, kind_unavailable = choices.get(kind, {}), unavailable.get(kind, {})
        decisions[kind] = {}
        for shape, name in kind_choices.items():
            if shape not in kind_unavailable:
                decisions[kind][shape] = (name, "kept with the run")
        for shape in measured_by_rank[0]:  # ranks with the same kind of device measure the same shapes
            # The same choice as `find_fallback` in ops/attention_backends.py, from the text of the shape.
            fallback = "eager" if ", softcap " in shape or ", sinks" in shape else "sdpa"
            name, reasons = _decide_fastest([measured[shape] for measured in measured_by_rank], fallback)
            if shape in kind_unavailable:
                reasons.insert(
                    0,
                    f"replaces {kind_choices[shape]}, which the run started with and which is unavailable now: "
                    f"{kind_unavailable[shape]}; from here on the run rounds differently than an uninterrupted one",
                )
            elif len(measured_by_rank) > 1:
                reasons.insert(0, f"agreed by {len(measured_by_rank)} ranks")
            decisions[kind][shape] = (name, "; ".join(reasons))
    return decisions


def find_slowest_times(measurements: list[Measurement]) -> dict[str, float]:
    """Return the time on the slowest rank of each kernel that runs on all ranks.

    Args:
        measurements: one per rank, for the same shape.
    """
    milliseconds_by_rank = [milliseconds for milliseconds, _ in measurements]
    slowest: dict[str, float] = {}
    for name in milliseconds_by_rank[0]:
        if all(name in milliseconds for milliseconds in milliseconds_by_rank):
            slowest[name] = max(milliseconds[name] for milliseconds in milliseconds_by_rank)
    return slowest


def _decide_fastest(measurements: list[Measurement], fallback: str) -> tuple[str, list[str]]:
    """Return the kernel whose time on the slowest rank is the shortest, and the reasons: times and refusals.

    Args:
        measurements: one per rank, for the same shape.
        fallback: kernel to return if no kernel runs on all ranks.
    """
    slowest = find_slowest_times(measurements)
    fastest = min(sorted(slowest), key=slowest.__getitem__, default=fallback)
    # A time of 0 stands for a kernel that was chosen without a measurement.
    reasons = [f"{name} {ms:.3f} ms" for name, ms in sorted(slowest.items(), key=lambda item: item[1]) if ms]
    reason_by_name: dict[str, str] = {}  # of kernels that some rank cannot run
    for _, refusals in reversed(measurements):  # if several ranks have a reason, the first rank's counts
        reason_by_name |= refusals
    reasons += [f"{name}: {reason}" for name, reason in reason_by_name.items() if name != fastest]
    return fastest, reasons


def read_choices(run: Path, checkpoints: Path | str, resume: bool) -> Choices:
    """Return the choices of earlier starts, none unless `resume`.

    Choices of the newest checkpoint replace those of RUN/kernels.json.
    """
    choices: Choices = {}
    if not resume:
        return choices
    records: list[Any] = []  # the later record replaces choices of the earlier one
    # Missing or damaged choices are measured again.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        records.append(json.loads(read_small_text(run / FILE))["attention"])
    with contextlib.suppress(OSError, MegascaleError, step_folders.DamagedCheckpoint):
        commits, _ = step_folders.list_commits(open_storage(checkpoints))
        if commits:
            newest = max(commits, key=lambda commit: commit.sequence)
            records.append(newest.state.get("attention"))
    for record in records:
        if isinstance(record, dict):
            for kind, names_by_shape in record.items():
                choices.setdefault(kind, {}).update(names_by_shape)
    return choices


def write_choices(run: Path, choices: Choices) -> None:
    """Write the choices to RUN/kernels.json."""
    temporary = run / f"{FILE}.tmp"
    temporary.write_text(strict_json.dumps({"attention": choices}, indent=1) + "\n")
    os.replace(temporary, run / FILE)
