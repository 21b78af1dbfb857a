"""Which attention kernels a run computes with: measured by every rank, agreed by all, and kept with the run.

Ranks on devices of one kind run the same kernel for the same shape: the one whose slowest rank is the fastest, among
those that all of them can run. The choice is kept in RUN/kernels.json and in every checkpoint, since another kernel
rounds otherwise: a run that goes on with the same kernels goes on bit for bit, on GPUs with kernels.deterministic.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config
from megascale.core import strict_json
from megascale.core.untrusted_files import read_small_text
from megascale.errors import ConfigError, MegascaleError
from megascale.ops import dispatch
from megascale.ops.attention import AttentionChooser, AttentionShape

FILE = "kernels.json"
Choices = dict[str, dict[str, str]]  # kind of device -> shape -> backend
Decision = tuple[str, str]  # backend, and why, for people
Decisions = dict[str, dict[str, Decision]]  # kind of device -> shape -> decision
# Kind of device, and shape -> (milliseconds of each backend, why others did not run).
Offer = tuple[str, dict[str, tuple[dict[str, float], dict[str, str]]]]


def shapes(config: Config, tensor: int, dtype: torch.dtype) -> list[AttentionShape]:
    """Every attention that training runs on a rank, whichever layers it holds."""
    model, S = config.model, config.model.sequence_length
    windows = dict.fromkeys(model.layer_window(layer) for layer in range(model.layers))
    masks = dict.fromkeys(None if window is None or window >= S else window for window in windows)
    heads = (model.heads // tensor, model.kv // tensor, model.head_size)
    return [AttentionShape(S, config.train.micro_batch, *heads, window, dtype) for window in masks]


def agree(
    config: Config,
    tensor: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: Choices | None,
    chooser: AttentionChooser,
) -> tuple[Choices, dict[str, str]]:
    """Settle on kernels, collectively over the default group, and tell `chooser`.

    Args:
        tensor: tensor-parallel size.
        kept: choices of earlier starts; rank 0's count.

    Returns:
        What the run has chosen by now, and in words what devices of other kinds than this rank's run.

    Raises ConfigError where a kernel is named that cannot compute one of the shapes here.
    """
    if dispatch.mode() == "reference":
        return kept or {}, {}
    if (named := config.kernels.attention) != "auto":
        for shape in shapes(config, tensor, dtype):
            if why := chooser.explain_refusal(named, shape, device):
                remedy = "" if "--kernels.attention=" in why else "; set --kernels.attention=auto"
                raise ConfigError(f"attention {shape} cannot be computed by {named!r} on {device.type}: {why}{remedy}")
        return kept or {}, {}
    peers = Peers()
    kept = peers.broadcast(kept or {}, Choices)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    wanted = shapes(config, tensor, dtype)
    refusals = {
        str(shape): chooser.explain_refusal(name, shape, device)
        for shape in wanted
        if (name := kept.get(kind, {}).get(str(shape))) is not None
    }
    told = peers.gather((kind, refusals), tuple[str, dict[str, str | None]])
    lost = peers.broadcast(_lost(told), Choices)
    measured = {}
    for shape in wanted:
        if str(shape) not in kept.get(kind, {}) or str(shape) in lost.get(kind, {}):
            choice = chooser.measure(shape, device)
            measured[str(shape)] = (choice.milliseconds or {choice.name: 0.0}, choice.refused)
    if measured and device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with must not lie between the engine's buffers
    offers = peers.gather((kind, measured), Offer)
    decisions: Decisions = peers.broadcast(_decide(offers, kept, lost), Decisions)
    for shape in wanted:
        chooser.adopt(shape, *decisions[kind][str(shape)])
    names = {
        each: {**kept.get(each, {}), **{shape: name for shape, (name, _) in decisions.get(each, {}).items()}}
        for each in {**kept, **decisions}
    }
    others = {
        f"attention {shape} on {each}": f"{name} ({why})"
        for each, found in decisions.items()
        if each != kind
        for shape, (name, why) in found.items()
    }
    return names, others


def _lost(told: list[tuple[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """kind -> shape -> which rank cannot run the kept kernel, and why."""
    found: dict[str, dict[str, str]] = {}
    for rank, (kind, refusals) in enumerate(told):
        for shape, why in refusals.items():
            if why:
                found.setdefault(kind, {}).setdefault(shape, f"rank {rank}: {why}")
    return found


def _decide(
    offers: list[Offer],
    kept: Choices,
    lost: Mapping[str, Mapping[str, str]],
) -> Decisions:
    """kind -> shape -> the backend for all devices of that kind, a function of what was gathered alone."""
    found: dict[str, dict[str, Decision]] = {}
    for kind in dict.fromkeys(kind for kind, _ in offers):
        ranks = [measured for each, measured in offers if each == kind]
        gone = lost.get(kind, {})
        found[kind] = {s: (name, "kept with the run") for s, name in kept.get(kind, {}).items() if s not in gone}
        for shape in ranks[0]:
            times = [measured[shape][0] for measured in ranks]
            common = [name for name in times[0] if all(name in each for each in times)]
            slowest = {name: max(each[name] for each in times) for name in common}
            name = min(sorted(slowest), key=slowest.__getitem__, default="sdpa")
            parts = [f"{n} {ms:.3f} ms" for n, ms in sorted(slowest.items(), key=lambda item: item[1]) if ms]
            refused = {n: why for measured in reversed(ranks) for n, why in measured[shape][1].items()}
            parts += [f"{n}: {why}" for n, why in refused.items() if n != name]
            if shape in gone:
                parts.insert(
                    0,
                    f"in place of {kept[kind][shape]}, which the run was begun with and which cannot be had any more: "
                    f"{gone[shape]}; from here on it rounds otherwise than an uninterrupted run",
                )
            elif len(ranks) > 1:
                parts.insert(0, f"agreed by {len(ranks)} ranks")
            found[kind][shape] = (name, "; ".join(parts))
    return found


def read(run: Path, checkpoints: Path | str, resume: bool) -> Choices:
    """What earlier starts of a run chose: of its newest checkpoint, else of its folder; nothing if it starts over."""
    found: Choices = {}
    if not resume:
        return found
    records: list[Any] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        records.append(json.loads(read_small_text(run / FILE))["attention"])
    with contextlib.suppress(OSError, MegascaleError, folders.Damaged):
        storage = open_storage(checkpoints)
        newest = folders.survey(storage)[0]
        if newest:
            commit = max(newest, key=lambda commit: commit.sequence)
            records.append(commit.state.get("attention"))
    for record in records:
        if isinstance(record, dict):
            for kind, names in record.items():
                found.setdefault(kind, {}).update(names)
    return found


def write(run: Path, choices: Choices) -> None:
    """Keep the choices in the run folder."""
    temporary = run / f"{FILE}.tmp"
    temporary.write_text(strict_json.dumps({"attention": choices}, indent=1) + "\n")
    os.replace(temporary, run / FILE)
