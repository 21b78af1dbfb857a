"""`tests.chaos soak --parts journal`: one running job whose driver is killed and its journal damaged, many times.

Each time the journal or its write-ahead log is cut, garbled, set back to an older state or removed, and the driver is
started again. Trainers must go on: the same processes, the same attempt, new steps. In the end the weights must be
those of an undisturbed run of as many steps.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import WAIT, Launched, make
from tests.chaos.soak.command import Report, SoakCase

_STEPS = 10_000_000  # never reached: the job is interrupted
_MORE = 3  # new steps that show that training goes on
_FILE = "journal.sqlite"


def run(cases: range, seed: int, folder: Path, report: Report) -> None:
    """Damage one job's journal once for each case. A last case compares its weights."""
    file, rng = make(folder), random.Random(seed)
    arguments = [f"--train.steps={_STEPS}", "--resilience.test_spares=false", "--lr.schedule=constant"]
    job = Launched(file, "disturbed", arguments, pace=0.02)
    old = folder / "old"
    try:
        job.first(lambda e: e.kind == "first_step")
        for _ in cases:
            report(_case(job, rng, old))
        job.process.send_signal(signal.SIGINT)
        code = job.process.wait(WAIT)
    finally:
        job.end(0.1)
        job.end_agents()
    report(_weights(job, file, code, arguments))


def _case(job: Launched, rng: random.Random, old: Path) -> SoakCase:
    kind = rng.choice(list(DAMAGES))
    if not _wait(lambda: _phase(job) == "running"):
        return SoakCase(kind, False, f"the job did not run before the damage; its phase is {_phase(job)!r}")
    time.sleep(rng.uniform(0.0, 1.0))  # the journal is written to meanwhile
    before, attempt = _pids(job), _attempt(job)
    if 0 in before:
        return SoakCase(kind, False, f"the ranks have no status file: processes {before}")
    job.process.kill()
    job.process.wait()
    if rng.random() < 0.5:
        _empty_log(job.run)  # else the file itself would hardly hold anything
    names = [_FILE, f"{_FILE}-wal", f"{_FILE}-shm"]
    present = [job.run / name for name in names if (job.run / name).exists()]
    copies = {path.name: path.read_bytes() for path in present}
    subject = f"{kind}: {DAMAGES[kind](job.run, rng, old)}"
    if not old.exists() or rng.random() < 0.2:  # a state to be set back to
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        for name, data in copies.items():
            (old / name).write_bytes(data)
    step = job.step()
    last = time.time()
    job.start()
    wrong = []
    if not _wait(lambda: any(e.kind == "driver_took_over" and e.time > last for e in job.events())):
        wrong.append("no driver took over")
    _wait(lambda: _phase(job) == "running" and len([e for e in _read_since(job, last) if e.kind == "node_joined"]) >= 2)
    if not _wait(lambda: job.step() > step + _MORE):
        wrong.append(f"no step after {job.step()}")
    if _pids(job) != before:
        wrong.append("its trainers were ended")
    if _attempt(job) != attempt:
        wrong.append(f"attempt {attempt} became {_attempt(job)}")
    noted = [e.kind for e in _read_since(job, last) if e.kind.startswith("journal_") or e.kind == "attempt_adopted"]
    if wrong:
        story = [f"{e.kind} {e.evidence}" for e in _read_since(job, last)]
        return SoakCase(subject, False, f"{'; '.join(wrong)}; {story[:20]}")
    return SoakCase(subject, True, f"trainers went on; noted: {', '.join(noted) or 'nothing, as nothing was lost'}")


def _read_since(job: Launched, when: float) -> list[Any]:
    return [e for e in job.events() if e.time > when]


def _wait(result: Callable[[], bool], grace_period: float = 60.0) -> bool:
    deadline = time.monotonic() + grace_period
    while time.monotonic() < deadline:
        if result():
            return True
        time.sleep(0.05)
    return False


def _job(job: Launched) -> Any:
    from megascale.errors import DataError
    from megascale.resilience.driver.state.journal_reader import JournalReader

    try:
        reader = JournalReader(job.run)
    except DataError:
        return None
    reader.close()
    return reader.job


def _phase(job: Launched) -> str:
    result = _job(job)
    return result.phase.value if result is not None else ""


def _attempt(job: Launched) -> int:
    result = _job(job)
    return result.attempt if result is not None else -1


def _pids(job: Launched) -> list[int]:
    from megascale.core.status import read_status

    def pid(rank: int) -> int:
        for _ in range(100):  # a record that is being written is read as none
            status = read_status(job.run / "status" / f"rank-{rank}.status")
            if status is not None:
                return status.pid
            time.sleep(0.01)
        return 0

    return [pid(rank) for rank in range(2)]


# damages ------------------------------------------------------------------------------------------------------------


def _victim(run: Path, wal: bool) -> Path:
    log = run / f"{_FILE}-wal"
    return log if wal and log.exists() and log.stat().st_size else run / _FILE


def _empty_log(run: Path) -> None:
    """Write the log into the file, as SQLite does now and then."""
    db = sqlite3.connect(run / _FILE)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def _cut(wal: bool) -> Callable[[Path, random.Random, Path], str]:
    def damage(run: Path, rng: random.Random, old: Path) -> str:
        file = _victim(run, wal)
        size = file.stat().st_size
        at = rng.randrange(size)
        os.truncate(file, at)
        return f"{file.name} cut from {size} to {at} bytes"

    return damage


def _flip(wal: bool) -> Callable[[Path, random.Random, Path], str]:
    def damage(run: Path, rng: random.Random, old: Path) -> str:
        file = _victim(run, wal)
        data = bytearray(file.read_bytes())
        locations = sorted(rng.randrange(len(data)) for _ in range(rng.choice([1, 4, 40])))
        for location in locations:
            data[location] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        return f"{len(locations)} bits of {file.name} ({len(data)} bytes) flipped, the first at {locations[0]}"

    return damage


def _remove(run: Path, rng: random.Random, old: Path) -> str:
    names = rng.choice([(_FILE,), (f"{_FILE}-wal",), (_FILE, f"{_FILE}-wal", f"{_FILE}-shm")])
    for name in names:
        (run / name).unlink(missing_ok=True)
    return f"{', '.join(names)} removed"


def _set_back(run: Path, rng: random.Random, old: Path) -> str:
    if not old.exists():
        return _remove(run, rng, old)
    for name in (_FILE, f"{_FILE}-wal", f"{_FILE}-shm"):
        (run / name).unlink(missing_ok=True)
    for file in old.iterdir():
        shutil.copy(file, run / file.name)
    return "an older copy in its place"


DAMAGES: dict[str, Callable[[Path, random.Random, Path], str]] = {
    "cut the file": _cut(False),
    "cut the log": _cut(True),
    "garble the file": _flip(False),
    "garble the log": _flip(True),
    "remove": _remove,
    "set back": _set_back,
}


# the result ---------------------------------------------------------------------------------------------------------


def _weights(job: Launched, file: Path, code: int, arguments: list[str]) -> SoakCase:
    """The interrupted job's last checkpoint against `megascale train` of as many steps, in the same layout."""
    import torch

    from megascale import checkpoint

    step = checkpoint.latest(job.run / "checkpoints") or 0
    subject = f"weights after step {step} and the journal's damages"
    if code != 130:
        return SoakCase(subject, False, f"the job ended with {code}: {job.output.read_text()[-2000:]}")
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(file), "--train.name=calm"] + arguments
    done = subprocess.run(command + [f"--train.stop_after={step}"], capture_output=True, text=True)
    if done.returncode:
        return SoakCase(subject, False, f"the undisturbed run ended with {done.returncode}: {done.stderr[-2000:]}")
    expected, result = _state(file.parent / "runs" / "calm"), _state(job.run)
    separate = [name for name, tensor in expected.items() if not torch.equal(tensor, result[name])]
    if separate or expected.keys() != result.keys():
        return SoakCase(subject, False, f"{len(separate)} of {len(expected)} tensors differ from an undisturbed run's")
    return SoakCase(subject, True, "bit for bit those of an undisturbed run")


def _state(run: Path) -> dict[str, Any]:
    from megascale.train.restore import restore_engine

    engine, _ = restore_engine(run, device="cpu")
    return {
        name: tensor.clone() for name, _, _, tensor in engine.optimizer.logical_tensors() if name.startswith("model.")
    }
