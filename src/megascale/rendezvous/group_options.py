"""Choices for the groups of a job that follow from the configuration: channels, first calls, members without a call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megascale.config.parts import OPTIMIZERS
from megascale.rendezvous.group_plan import DIRECTIONS, STATE_KINDS

if TYPE_CHECKING:
    from megascale.config import Config

WarmCall = Literal["all_reduce", "all_gather", "reduce_scatter"]
# With more ranks gloo connects two ranks when they first exchange data, instead of every rank to every rank at once.
MAX_GLOO_MESH_RANKS = 256


@dataclass(frozen=True)
class GroupOptions:
    """Choices for the groups of a job, by kind of group.

    Attributes:
        max_channels: largest number of NCCL channels. For None or a missing kind, NCCL chooses.
        late_kinds: kinds of groups that the job may never use. They are not warmed up, and NCCL makes their
            communicators in their first call.
        warm_calls: collective that warms up a group; for a missing kind an all-reduce. NCCL connects ranks for one
            algorithm at its first use. A small all-reduce may use another one than a step's collectives.
    """

    max_channels: Mapping[str, int | None]
    late_kinds: Collection[str]
    warm_calls: Mapping[str, WarmCall]


def choose_group_options(config: Config) -> GroupOptions:
    """Return the choices for the groups of a configuration, equal on every rank."""
    max_channels: dict[str, int | None] = dict.fromkeys(DIRECTIONS, config.max_channels("pipeline"))
    max_channels |= dict.fromkeys(("data_gather", "data_reduce"), config.max_channels("data"))
    warm_calls: Mapping[str, WarmCall] = {}
    if config.parallel.zero:
        warm_calls = {"data_gather": "all_gather", "data_reduce": "reduce_scatter"}
    # Other optimizers than those that communicate may never use the groups of the state.
    late_kinds: Collection[str] = STATE_KINDS
    if OPTIMIZERS[config.optimizer.name].communicates:
        late_kinds = ()
    return GroupOptions(max_channels, late_kinds, warm_calls)
