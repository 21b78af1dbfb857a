"""What reading a crafted file costs: each in a fork of one process, so that its memory is its own.

Run as a program: `python -m tests.chaos.hostile.files FOLDER SOUND`, with a sound checkpoint's run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT = 60.0  # seconds after which a reader that has not refused counts as held


@dataclass(frozen=True)
class FileCost:
    """Cost of reading a file.

    Attributes:
        name: what was crafted.
        refused: whether every reader refused it, or none did where it is sound, in a sentence.
        mib: memory above what reading the sound one takes.
        seconds: that it took.
        said: the last reader's words.
    """

    name: str
    refused: bool
    mib: float
    seconds: float
    said: str


def main(folder: Path, sound: Path) -> None:
    """Print a JSON line for each crafted checkpoint and model."""
    from megascale.model.huggingface import import_model  # noqa: F401 - before the forks
    from tests.chaos.fuzz import crafted_checkpoints, crafted_models

    base: float | None = None
    cases: list[tuple[str, Callable[[], list[str]]]] = [("sound", list)]
    for name, craft in crafted_checkpoints.CRAFTED.items():
        cases.append((name, lambda craft=craft: _checkpoint(folder, sound, craft)))  # type: ignore[misc]
    for name, (family, change) in crafted_models.CRAFTED.items():
        cases.append((name, lambda family=family, change=change: _model(folder, family, change)))  # type: ignore[misc]
    for name, read in cases:
        if name == "sound":
            read = lambda: _checkpoint(folder, sound, None)
        cost = measure(name, read, base or 0.0)
        base = cost.mib if base is None else base
        print(json.dumps(asdict(cost)), flush=True)


def measure(name: str, read: Callable[[], list[str]], base: float) -> FileCost:
    """Run `read` in a fork, which returns what each reader that did not refuse said."""
    received, continues = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.close(received)
        try:
            wrong = read()
            text = "; ".join(wrong)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(continues, text.encode()[:4000])
        os._exit(0)
    os.close(continues)
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > LIMIT:
            os.kill(child, 9)
        time.sleep(0.01)
    with os.fdopen(received, "rb") as pipe:
        text = pipe.read().decode()
    if status:
        text = f"it ended by {status}; {text}"
    return FileCost(name, not text, usage.ru_maxrss / 1024 - base, time.monotonic() - began, text)


def _checkpoint(folder: Path, sound: Path, craft: Callable[[Path], None] | None) -> list[str]:
    """Return the errors of the checkpoint readers for a file."""
    from megascale.checkpoint import inspect
    from megascale.checkpoint.complete_checkpoint import open_checkpoint
    from megascale.checkpoint.format.step_folders import steps
    from megascale.checkpoint.format.verify import verify
    from megascale.checkpoint.storage.opening import open_storage
    from megascale.errors import MegascaleError

    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    step = min(steps(sound / "checkpoints"))
    location = run / "checkpoints" / f"step-{step}"
    shutil.copytree(sound / "checkpoints" / f"step-{step}", location)
    if craft is not None:
        craft(location)
    wrong = []
    if inspect(run).committed == (craft is not None):
        wrong.append(f"inspect says committed={craft is not None}")
    if bool(verify(open_storage(run / "checkpoints"), step).problems) == (craft is None):
        wrong.append("verify is wrong about it")
    try:
        full = open_checkpoint(run)
        for name in full.tensors:
            full.read_tensor(name)
        if craft is not None:
            wrong.append("it was opened")
    except MegascaleError as error:
        if craft is None:
            wrong.append(f"the sound one was refused: {error}")
    return wrong


def _model(folder: Path, family: str, change: Callable[[Path], object]) -> list[str]:
    from megascale.errors import MegascaleError
    from megascale.model.huggingface.import_model import read_folder
    from tests.chaos.fuzz.crafted_models import write_model

    location = folder / "model"
    shutil.rmtree(location, ignore_errors=True)
    write_model(location, family)
    change(location)
    try:
        read_folder(location)
    except MegascaleError:
        return []
    return ["it was imported"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
