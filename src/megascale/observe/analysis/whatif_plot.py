"""A heat map of the workers of a job: what each would cost alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.observe.analysis.whatif import WhatIf

_FORMATS = (".png", ".svg", ".pdf")
_NUMBERED = 400  # cells at most that carry their number


def draw_worker_scores(found: WhatIf, path: Path) -> None:
    """Draw the scores, stages down and replicas across. ConfigError on another kind of file."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--plot={path} is no picture that can be drawn; end it in {', '.join(_FORMATS)}")
    from matplotlib.figure import Figure

    stages, replicas = found.scores.shape
    figure = Figure(figsize=(min(24.0, 3.4 + 0.55 * replicas), min(18.0, 1.6 + 0.5 * stages)), layout="constrained")
    axes = figure.subplots()
    # From no slow-down on, and to 1.5 as the published maps are, unless more is there.
    image = axes.imshow(found.scores, cmap="Reds", vmin=1.0, vmax=max(1.5, float(found.scores.max())), aspect="auto")
    if found.scores.size <= _NUMBERED:
        middle = (1.0 + image.get_clim()[1]) / 2
        for (stage, replica), score in np.ndenumerate(found.scores):
            colour = "white" if score > middle else "black"
            axes.text(replica, stage, f"{score:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set(xlabel="data-parallel replica", ylabel="pipeline stage", yticks=range(stages))
    if replicas <= 32:
        axes.set_xticks(range(replicas))
    figure.suptitle(f"slow-down with one worker as recorded (whole job: {found.slow_down:.3f})", fontsize=9)
    figure.colorbar(image, ax=axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
