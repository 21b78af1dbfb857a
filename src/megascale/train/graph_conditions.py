"""Conditions under which a rank captures its chunks as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megascale.core.layout import Layout
from megascale.core.rank_memory import GPU_CONTEXT, explain_no_graphs
from megascale.parallel.collectives import Axis


class GraphConditions:
    """Conditions of one rank.

    Args:
        stage: the rank's pipeline stage.
        overlaps: description of each overlap by name (`Engine.active`).
    """

    def __init__(
        self,
        layout: Layout,
        stage: int,
        *,
        device: torch.device,
        tensor_axis: Axis,
        context_axis: Axis,
        overlaps: Mapping[str, str],
    ) -> None:
        self._layout = layout
        self._stage = stage
        self._device = device
        self._tensor_axis = tensor_axis
        self._context_axis = context_axis
        self._overlaps = overlaps

    def find_obstacle(self) -> str:
        """Return why chunks cannot be captured, "" if they can. Ranks of a stage with equal GPUs return the same."""
        # The estimate also says why the settings exclude graphs, or that their memory does not fit.
        _, reason = self._layout.stage_memory(self._stage, self.find_memory_limit(), measures_launches=True)
        if reason or self._device.type != "cuda":
            return reason
        if self._tensor_axis.size > 1 and self._tensor_axis.exchange is None:
            overlap = self._overlaps["tensor overlap"]
            return f"only the fused exchange of tensor parallelism is captured, and tensor overlap is {overlap}"
        if self._context_axis.size > 1 and self._context_axis.exchange is None:
            exchange = self._overlaps["context exchange"]
            return f"only copies between context ranks are captured, and the exchange is {exchange}"
        return ""

    def find_shared_obstacle(self, find_row_exchange_obstacle: Callable[[], str]) -> str:
        """Return why no rank of the job captures graphs, "" if ranks may. All ranks return the same.

        Args:
            find_row_exchange_obstacle: returns why the embedding's gradient cannot be reduced by rows.
        """
        config = self._layout.config
        # Without a limit of memory the configuration alone decides.
        _, obstacle = self._layout.stage_memory(0, measures_launches=True)
        if obstacle or config.kernels.graphs != "auto" or config.overlap.embedding == "dense":
            return obstacle
        if explain_no_graphs(config, self._layout.grid) and not find_row_exchange_obstacle():
            # Launches are expected to be short, so the certain gain precedes the possible one.
            return (
                f"overlap.embedding={config.overlap.embedding} reduces the embedding's gradient by rows, and graphs "
                "write the dense gradient; set --overlap.embedding=dense"
            )
        return ""

    def find_missing_gib(self) -> float:
        """Return the GiB that this rank lacks for graphs, next to the peak of the steps so far; 0 if it has enough."""
        spare_bytes = self.find_spare_bytes()
        if spare_bytes is None:
            return 0.0
        memory, _ = self._layout.stage_memory(self._stage, measures_launches=True)
        return max(0.0, (memory.graph_buffers - spare_bytes) / 2**30)

    def find_memory_limit(self) -> int | None:
        """Return the bytes that this rank's tensors may take; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.get_device_properties(self._device).total_memory - GPU_CONTEXT

    def find_spare_bytes(self) -> int | None:
        """Return the bytes of the device that no step so far has needed; None on a CPU."""
        if self._device.type != "cuda":
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        cached_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
        return free_bytes + cached_bytes
