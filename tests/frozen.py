"""Loaded last by the fork server (forked.py): what is loaded by then no collection of a child looks through, which
takes a tenth of a second and copies the pages that it looks at."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch

from megascale.cli.main import app  # noqa: F401 - with all modules of commands
from megascale.train import host_pauses

torch.manual_seed(torch.initial_seed())  # the first call loads modules of devices
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(5_000)
# A training unfreezes all objects at its end. The next collection would copy the pages of everything that is loaded,
# which takes half a second. `tests/train/test_garbage.py` tests freezing itself.
host_pauses.gc = SimpleNamespace(  # type: ignore[assignment]
    **vars(gc) | {"freeze": lambda: None, "unfreeze": lambda: None}
)
