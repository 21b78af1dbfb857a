"""Shared fixtures: one thread per worker, since tests run side by side, and a small data set of random tokens."""

from __future__ import annotations

import compileall
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.campaign import select_tests
from tests.forked import BENCHMARKS, CHAOS, COMMAND, Forked, share_server, use_shared_server

# Collections while torch and the tests are loaded free nothing and take a fifth of the time of the imports.
gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Ranks that tests fork free and allocate the same small tensors in each step. By default glibc returns the memory to
# the kernel in between, and the kernel clears each page again.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(1 << 24))
# The processes that tests start compile the package once, not each for itself, and pytest keeps the tests as it has
# rewritten them, which takes a run of all 5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["MEGASCALE_STRICT_TRANSITIONS"] = "1"  # what a driver's state machine does not have is an error here

# Gloo's event loop polls without a pause while another thread holds the lock of a connection. A batch process is not
# preempted by the peer that it wakes, so it seldom loses the processor together with that lock.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A test runner of commands makes all of them anew for each that it runs, which takes 50 ms.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# How long an example or its making takes says how busy the machine is.
# Tests that state no number of random examples draw this many. More of them are a campaign (dev/soak.md).
EXAMPLES = int(os.environ.get("MEGASCALE_TEST_EXAMPLES", "50"))
settings.register_profile(
    "any machine", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Share a fork server between the workers of pytest-xdist. Its start takes as long as a hundred commands."""
    # Extensions look at their end for objects that were never freed. pytest collects garbage five times before, and
    # cleanups run in reverse order.
    config.add_cleanup(gc.unfreeze)
    if hasattr(config, "workerinput"):
        use_shared_server()
    elif (getattr(config.option, "numprocesses", None) or 0) > 1 and not config.option.collectonly:
        if not sys.dont_write_bytecode:
            # In a new clone the fork server and all workers would compile the package at the same time.
            compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)
        share_server()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send tests without a group to workers by file if `--dist loadgroup` is given.

    A module's fixtures and imports are then made in one worker instead of each.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return group if group != nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of `tests/campaign.toml` out."""
    select_tests(config, items)


def pytest_collection_finish() -> None:
    """Leave the objects of imports and collection out of later collections, each of which would take 0.1 s.

    A training in this process freezes what its start made and unfreezes all objects at its end. Here they stay frozen.
    """
    from megascale.train import host_pauses

    gc.freeze()
    gc.enable()
    gc.set_threshold(5_000)  # Python's 700 young objects are a few results of a test
    host_pauses.gc = SimpleNamespace(**vars(gc) | {"unfreeze": lambda: None})  # type: ignore[attr-defined]


# Seconds between two looks of a test at another process or thread. A loop without a pause keeps a processor busy.
POLL_INTERVAL = 0.01

TINY = """
[model]
layers = 2
hidden = 32
heads = 4
sequence_length = 16
vocab_size = 64
vocab_multiple = 8

[data]
train = ["{data}/train"]
valid = "{data}/valid"

[lr]
peak = 1e-2

[train]
runs = "{runs}"
name = "tiny"
steps = 8
micro_batch = 2
global_batch = 4
log_interval = 1
device = "cpu"
threads = 1

[checkpoint]
interval = 2

[observe]
tensorboard = false
"""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `train` and `valid` token files: 64 tokens, each likely to follow its predecessor."""
    from megascale.data.dataset.indexed import IndexedWriter

    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(0)
    for name, documents in (("train", 40), ("valid", 4)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(documents):
                steps = rng.choice([1, 2, 5], p=[0.8, 0.1, 0.1], size=101)
                writer.add_document([np.cumsum(steps) % 64])
    return folder


@pytest.fixture
def tiny(tokens: Path, tmp_path: Path) -> Path:
    """Return a configuration file of a two-layer model. Its runs go to tmp_path/runs."""
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(data=tokens, runs=tmp_path / "runs"))
    return file


Run = Callable[..., subprocess.CompletedProcess[str]]


@contextlib.contextmanager
def _runner(module: str, folder: Path) -> Iterator[Run]:
    """Yield a function that runs a program with words in a process of its own, and returns the finished process."""
    started: list[Forked] = []

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = Forked(arguments, env={"COLUMNS": "200"} | (env or {}), cwd=folder, split=True, module=module)
        started.append(process)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.arguments, process.wait(), out, err)

    try:
        yield run
    finally:
        for process in started:
            process.kill()


@pytest.fixture
def megascale(tmp_path: Path) -> Iterator[Run]:
    """Run `megascale WORDS`."""
    with _runner(COMMAND, tmp_path) as run:
        yield run


@pytest.fixture
def benchmarks(tmp_path: Path) -> Iterator[Run]:
    """Run `python -m benchmarks WORDS`."""
    with _runner(BENCHMARKS, tmp_path) as run:
        yield run


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Run]:
    """Run `python -m tests.chaos WORDS`."""
    with _runner(CHAOS, tmp_path) as run:
        yield run


def lines(file: Path) -> list[dict]:
    """Return the records of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of document commands: those that ran, and those that were only parsed, with reasons."""
    messages = [
        (key, value)
        for report in terminalreporter.stats.get("passed", [])
        for key, value in report.user_properties
        if key.startswith("documents: ")
    ]
    for key, value in dict.fromkeys(messages):
        terminalreporter.write_line(f"{key}: {value}")
