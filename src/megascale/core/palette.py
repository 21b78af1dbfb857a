"""Colours of runs, of parts of a step and of kinds of memory, in plots and on the dashboard's pages.

The light theme of the pages repeats these colours (`observe/dashboard/pages/dashboard.css` and `colours.js`). A test
compares them.
"""

from __future__ import annotations

FORWARD = "#4d8fcc"
BACKWARD = "#2f9e77"
OPTIMIZER = "#8a63b8"
OTHER = "#8d979f"
BUBBLE = "#c9ced4"
EXPOSED = "#e08214"
SAMPLES = "#c2498a"  # a rank waits for samples from the data loader

# Okabe and Ito's colours, darker for light backgrounds.
RUNS = ("#0067a5", "#b34700", "#007a5a", "#a3447f", "#8a6000", "#2c7fa8", "#4b4b4b", "#7a3fb0")

# Kinds of memory, in the order of `megascale plan`.
MEMORY = {
    "weights": "#b34700",
    "gradients": "#8a6000",
    "optimizer": "#a3447f",
    "activations": "#4f7cac",
    "logits": "#6b6f76",
    "workspace": "#9a8f3c",
    "buffers": "#9aa3ad",
    "reserve": "#d5dade",
}

# Share of white, or of black if negative, in the colour of each chunk of a stage, from the first chunk on.
_CHUNK_SHARES = (-0.4, 0.0, 0.25, 0.45, 0.6, 0.74)


def mix(colour: str, share: float) -> str:
    """Return the colour #rrggbb mixed with a share of white, or of black if the share is negative."""
    target = 255 if share > 0 else 0
    channels = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    mixed = [round(channel + (target - channel) * abs(share)) for channel in channels]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def list_chunk_shades(colour: str) -> tuple[str, ...]:
    """Return the shades of a stage's chunks, from dark to light. The second shade is the colour itself."""
    return tuple(mix(colour, share) for share in _CHUNK_SHARES)
