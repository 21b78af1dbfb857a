"""Selection of a rank's kernels and streams, which some ranks must agree on."""

from __future__ import annotations

import torch

from megascale.core.layout import Layout
from megascale.ops import launch
from megascale.ops.dispatch import Kernels, hide_workspace_setting, prepare_determinism
from megascale.parallel.runtime import Runtime
from megascale.train.attention_choice import Choices, agree_on_kernels
from megascale.train.determinism_choice import Determinism, decide_determinism


class KernelSelection:
    """Selects the kernels of an engine, and sets them in its runtime.

    Args:
        runtime: kernels, streams and the chooser of attention kernels.
        dtype: type of activations.
        max_documents: largest number of documents per sample; 0 without document boundaries.

    Attributes:
        attention: attention kernels by kind of device and shape, to be saved with the run.
    """

    def __init__(
        self, layout: Layout, runtime: Runtime, *, dtype: torch.dtype, device: torch.device, max_documents: int
    ) -> None:
        self.attention: Choices = {}
        self._config = layout.config
        self._grid = layout.grid
        self._runtime = runtime
        self._dtype = dtype
        self._device = device
        self._max_documents = max_documents

    def select(self, earlier_choices: Choices | None, *, has_groups: bool) -> dict[str, str]:
        """Set kernels and streams and, if ranks have to agree, attention kernels. Return start-up lines by name.

        Args:
            earlier_choices: as for `Engine`.
            has_groups: whether this rank has groups.
        """
        config, runtime = self._config, self._runtime
        runtime.attention.backend = config.kernels.attention
        runtime.kernels = Kernels(
            config.kernels.mode,
            deterministic=config.requested_determinism is True,
            reads_expert_blocks=config.kernels.expert_rows_gemm == "auto",
        )
        gemm_streams_text = runtime.use_side_stream(config.gemms_on_side_stream, self._device)
        determinism = self._decide_determinism(earlier_choices)
        self.attention = determinism.choices
        lines: dict[str, str] = {}
        if has_groups or earlier_choices is not None or determinism.measured:
            lines |= self._agree(determinism)
        if self._device.type == "cuda" or config.overlap.gemms == "on":
            if config.overlap.gemms == "auto":
                source = " (overlap.gemms=auto)"
            else:
                source = ""
            lines["independent GEMMs"] = gemm_streams_text + source
        if self._device.type == "cuda":
            lines["kernel launches"] = launch.describe()
        if determinism.description:
            lines["deterministic"] = determinism.description
        workspace = hide_workspace_setting(self._device)
        if workspace:
            lines["cuBLAS workspace"] = workspace
        return lines

    def repeat(self, earlier_choices: Choices) -> None:
        """Agree with the ranks of another attempt. Collective.

        Args:
            earlier_choices: as for `Engine`; without any, this rank's present choices count.
        """
        self._agree(self._decide_determinism(earlier_choices or self.attention))

    def _decide_determinism(self, earlier_choices: Choices | None) -> Determinism:
        """Decide whether steps must repeat bit for bit, and set it in the runtime's kernels."""
        runtime = self._runtime
        with runtime.kernels.as_current():
            determinism = decide_determinism(
                self._config,
                tensor=self._grid.tensor,
                dtype=self._dtype,
                device=self._device,
                earlier_choices=earlier_choices,
                chooser=runtime.attention,
                documents=self._max_documents,
                context=self._grid.context,
            )
        if determinism.is_on:
            prepare_determinism()  # a decision that is kept with the run was not prepared when it was read
        runtime.kernels.deterministic = determinism.is_on
        return determinism

    def _agree(self, determinism: Determinism) -> dict[str, str]:
        """Set the attention kernels on which all ranks agree, and return lines about other kinds of devices."""
        runtime = self._runtime
        with runtime.kernels.as_current():
            self.attention, descriptions = agree_on_kernels(
                self._config,
                self._grid.tensor,
                self._dtype,
                self._device,
                determinism.choices,
                runtime.attention,
                self._max_documents,
                self._grid.context,
                known=determinism.measured,
            )
        return descriptions
