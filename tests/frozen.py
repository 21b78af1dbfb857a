"""Loaded last by the fork server (forked.py): what is loaded by then no collection of a child looks through, which
takes a tenth of a second and copies the pages that it looks at."""

from __future__ import annotations

import gc

from megascale.cli.main import app  # noqa: F401 - with all modules of commands

gc.collect()
gc.freeze()
gc.enable()
