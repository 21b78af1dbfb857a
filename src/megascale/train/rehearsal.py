"""Rehearsal: a training step of a small model, with which a waiting process loads what its first step needs.

In a new process the first use of each kernel and library takes time: about 2 s for an engine and more than 1 s for the
first step (dev/log.md). A process that waits for its attempt has this time. The small model has one layer of each kind
of the run, in the run's precision and shapes, so that its step uses the same kernels on one rank.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import torch

from megascale.config import Config, resolve_precision
from megascale.config.model_section import LayerKind, ModelConfig
from megascale.core.batch import NO_FIELDS
from megascale.core.inventory import resolve_layers
from megascale.core.layout import Layout, lay_out
from megascale.train.attention_choice import Choices
from megascale.train.blank_batches import make_blank_batch
from megascale.train.engine import Engine
from megascale.train.rank_info import has_bfloat16, reset_peak

log = logging.getLogger("megascale.train")
_MEMORY_SHARE = 0.5  # of a GPU's free memory that a rehearsal may use


def rehearse(config: Config, device: torch.device, choices: Choices | None = None) -> bool:
    """Run one step of a small model, and return whether it was run. Errors are only logged.

    Args:
        config: the resolved configuration of the run.
        choices: attention kernels that the run has chosen, so that none are timed.
    """
    start_time = time.monotonic()
    try:
        layout = _lay_out_small_model(resolve_precision(config, has_bfloat16(device)))
        if device.type == "cuda":
            memory, _ = layout.stage_memory(0)
            if memory.total > _MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
                log.info("no rehearsal: its model of %.1f GB is too large for the GPU's memory", memory.total / 1e9)
                return False
        _run_step(layout, device, choices)
    except Exception as error:
        log.warning("the rehearsal of a step failed: %s", str(error) or repr(error))
        return False
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            reset_peak(device)
    log.info("rehearsed a step in %.2f s", time.monotonic() - start_time)
    return True


def _lay_out_small_model(config: Config) -> Layout:
    """Return the layout of a model with one layer of each kind, on one rank, with one micro-batch per step."""
    layers = resolve_layers(config.model)
    first_indices = {layer: index for index, layer in reversed(list(enumerate(layers)))}
    widths = _divide_widths(config)
    model = config.model.model_copy(update={"layers": 1 + max(first_indices.values()), **widths})
    parallel = config.parallel.model_copy(
        update={
            "tensor": 1,
            "pipeline": 1,
            "virtual_stages": 1,
            "micro_batch_group_size": None,
            "layer_split": None,
            "context": 1,
            "expert": 1,
            "experts_over": "tensor",
            "replicate": 1,
            "data": 1,
        }
    )
    overlap = config.overlap.model_copy(update={"gathers": "collectives", "reductions": "collectives"})
    train = config.train.model_copy(update={"global_batch": config.train.micro_batch})
    sections = {"model": model, "parallel": parallel, "overlap": overlap, "train": train}
    return lay_out(config.model_copy(update=sections), 1)


def _divide_widths(config: Config) -> dict[str, Any]:
    """Return settings of the model with the heads and the MLP widths that each rank has.

    The attention kernels of the run then have the same shapes, so that none are timed. Without settings the small model
    keeps the widths of all ranks: those that no whole number of ranks can share.
    """
    model = config.model
    tensor = config.parallel.tensor
    size = tensor * config.parallel.context  # ranks that share the heads
    sections: list[ModelConfig | LayerKind] = [model, *model.layer_kinds.values()]
    head_counts = [model.heads] + [section.kv_heads for section in sections if section.kv_heads is not None]
    widths = [section.ffn_hidden for section in sections if section.ffn_hidden is not None]
    if any(count % size for count in head_counts) or any(width % tensor for width in widths):
        return {}
    ffn_hidden = model.ffn_hidden or 4 * model.hidden
    kinds = {}
    for name, kind in model.layer_kinds.items():
        shares = {
            "kv_heads": kind.kv_heads and kind.kv_heads // size,
            "ffn_hidden": kind.ffn_hidden and kind.ffn_hidden // tensor,
        }
        kinds[name] = kind.model_copy(update=shares)
    return {
        "heads": model.heads // size,
        "kv_heads": model.kv_heads and model.kv_heads // size,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "ffn_hidden": ffn_hidden // tensor,
        "layer_kinds": type(model.layer_kinds)(kinds),
    }


def _run_step(layout: Layout, device: torch.device, choices: Choices | None) -> None:
    engine = Engine(layout, None, device, choices)
    config = layout.config
    length = config.model.sequence_length
    batch = make_blank_batch(NO_FIELDS, length, config.train.micro_batch, sequence_length=length, device=device)
    engine.start_gather()
    result = engine.step(lambda _: batch, 1, 0.0, has_next_step=False)
    float(result.loss)  # waits for the device
    engine.close()
