"""Axes of the grid of ranks, and whether each axis divides the batch or the parameters.

Process groups, gradient sums and norms derive from these facts. Built-in axes have a key of their own, `parallel.NAME`.
A plugin's axis has its size in `parallel.axes`, as NAME=SIZE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.config.registry import Registry
from megascale.errors import ConfigError


@dataclass(frozen=True)
class AxisFacts:
    """Facts of an axis.

    Attributes:
        cuts_batch: what ranks along the axis divide: "samples" of the global batch, "tokens" of each sample, or
            "nothing", so that these ranks process the same tokens. Gradients are summed over an axis that cuts the
            batch.
        cuts_parameters: whether the ranks hold different parts of some parameters. If not, every parameter is
            replicated along the axis.
        has_group: whether the model communicates along the axis in a process group of this axis alone.
        fills_world: whether the axis takes all ranks that the other axes leave, unless its size is set.
        divides_loss: whether ranks along an axis that cuts tokens and parameters compute parts of the loss. Otherwise
            they gather the tokens before the loss.
        copies_state: whether ranks along the axis hold copies of the shards. Gradients are summed over this axis
            once per step, after their reduction over the ranks that share the state.
        key: setting with the size of the axis; "" for a plugin's axis, whose size is in `parallel.axes`.
    """

    cuts_batch: Literal["samples", "tokens", "nothing"] = "nothing"
    cuts_parameters: bool = False
    has_group: bool = True
    fills_world: bool = False
    divides_loss: bool = False
    copies_state: bool = False
    key: str = ""

    @property
    def repeats_loss(self) -> bool:
        """True if ranks along the axis compute the same loss, False if they compute parts of a sum."""
        if self.cuts_batch == "tokens":
            return self.cuts_parameters and not self.divides_loss
        return self.cuts_batch == "nothing"


class AxisRegistry(Registry[AxisFacts]):
    """Facts of all axes by name, from the fastest axis, whose ranks are neighbours, to the slowest.

    The properties are names of axes, in the same order.
    """

    def register(self, name: str, entry: AxisFacts, after: str = "tensor") -> None:
        """Add an axis that is one step slower than the axis `after`. Raises ConfigError if the name is known.

        The pipeline stays the slowest axis, so that the ranks of a stage are consecutive.
        """
        if after == "pipeline":
            raise ConfigError(f"the axis {name!r} cannot be slower than the pipeline; register it after another axis")
        self[after]  # raises ConfigError for an unknown axis
        # A dictionary appends new keys: take the slower axes out, and put them back behind the new axis.
        slower_axes = {}
        names = self.names()
        for slower_name in names[names.index(after) + 1 :]:
            slower_axes[slower_name] = self.pop(slower_name)
        try:
            super().register(name, entry)
        finally:
            self.update(slower_axes)

    def setting(self, name: str) -> str:
        """Return the setting of an axis' size without `=SIZE`: its key, or `parallel.axes=NAME`."""
        return self[name].key or f"parallel.axes={name}"

    @property
    def filling(self) -> str:
        """Axis that takes the ranks which the other axes leave."""
        return next(name for name, facts in self.items() if facts.fills_world)

    @property
    def samples(self) -> tuple[str, ...]:
        """Axes along which ranks read different samples."""
        return tuple(name for name, facts in self.items() if facts.cuts_batch == "samples")

    @property
    def shards(self) -> tuple[str, ...]:
        """Axes along which every parameter is replicated and its gradient summed.

        Gradients are reduced, and optimizer state is sharded, over these axes together.
        """
        names = []
        for name, facts in self.items():
            if facts.cuts_batch != "nothing" and not facts.cuts_parameters and not facts.copies_state:
                names.append(name)
        return tuple(names)

    @property
    def copies(self) -> tuple[str, ...]:
        """Axes whose ranks hold copies of the shards."""
        return tuple(name for name, facts in self.items() if facts.copies_state)

    @property
    def replica(self) -> tuple[str, ...]:
        """Axes whose ranks together hold one copy of a pipeline stage's parameters."""
        return tuple(name for name in self.stage if name not in self.shards + self.copies)

    @property
    def state(self) -> tuple[str, ...]:
        """Axes whose ranks together hold one copy of a pipeline stage's optimizer state."""
        return tuple(name for name in self.stage if name not in self.copies)

    @property
    def stage(self) -> tuple[str, ...]:
        """Axes whose ranks belong to the same pipeline stage: all but the pipeline."""
        return tuple(name for name in self if name != "pipeline")


AXES = AxisRegistry(
    "parallel.axes",
    {
        "tensor": AxisFacts("tokens", cuts_parameters=True, key="parallel.tensor"),
        "context": AxisFacts("tokens", key="parallel.context"),
        # Takes the place of the context axis if its ranks divide the experts too (parallel.experts_over=context).
        "slice": AxisFacts("tokens", cuts_parameters=True, divides_loss=True, key="parallel.context"),
        # These ranks divide the parameters of experts. For all other parameters they are data-parallel ranks.
        "expert": AxisFacts("samples", cuts_parameters=True, key="parallel.expert"),
        "data": AxisFacts("samples", has_group=False, fills_world=True, key="parallel.data"),
        "replicate": AxisFacts("samples", copies_state=True, key="parallel.replicate"),
        "pipeline": AxisFacts(cuts_parameters=True, has_group=False, key="parallel.pipeline"),
    },
)
