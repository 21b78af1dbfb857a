BENCHES: tuple[str, ...] = (
    "bench",
    "init",
    "kernels",
    "rich",
    "schedules",
    "tokenize",
)

from __future__ import annotations

import importlib

import typer

BENCHES: tuple[str, ...] = (
    "bench",
    "init",
    "kernels",
    "rich",
    "schedules",
    "tokenize",
)
