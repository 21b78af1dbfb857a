"""Cases and clusters that several tests use."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.software import MEGASCALE, Software

GPT_13B = ModelConfig(layers=40, hidden=5120, heads=40, vocab_size=50304, sequence_length=2048)
GPT_175B = ModelConfig(layers=96, hidden=12288, heads=128, vocab_size=64000, sequence_length=2048)


def with_part(cluster: ClusterSpec, part: str, **figures: Any) -> ClusterSpec:
    """The cluster with figures of one part replaced."""
    return cluster.model_copy(update={part: getattr(cluster, part).model_copy(update=figures)})


def calm(name: str = "a100-roce") -> ClusterSpec:
    """A shipped cluster without slow hosts and jitter."""
    return with_part(load_cluster(name), "stragglers", slow_hosts=0.0, jitter=0.0)


def case(
    tensor: int = 8,
    pipeline: int = 8,
    virtual: int = 6,
    data: int = 4,
    micro: int = 1,
    batch: int = 256,
    software: Software = MEGASCALE,
    model: ModelConfig = GPT_175B,
) -> Case:
    """A scalar case."""
    return Case.from_model(
        model, software, tensor=tensor, pipeline=pipeline, virtual=virtual, data=data, micro=micro, batch=batch
    )
