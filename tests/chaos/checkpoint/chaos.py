"""Saving under attack: processes killed, hung and cut off, disks full, failing and short of power.

After every blow the newest committed checkpoint must load bit for bit, be no older than what was reported as saved,
and saving must go on. The state is a function of the step, so a loaded one can be checked whole.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale.checkpoint import Checkpointer, TensorShard, load
from megascale.checkpoint.background import service, service_protocol
from megascale.checkpoint.background.service_protocol import Goodbye, Register
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import save_to_storage
from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.config import CheckpointConfig
from megascale.errors import DataError, TrainingError
from tests.chaos.checkpoint.crash import FaultyDisk, JournalDisk, after_power_cut

KINDS = ("trainer", "service", "both", "hang", "power cut", "full disk", "disk error", "short write", "clock")
# Blows that need real processes; the others fail the disk inside this one.
WITH_PROCESSES = ("trainer", "service", "both", "hang", "clock")
_KEEP = 2


@dataclass
class Blow:
    """One point: what was done, whether all held, else what did not."""

    kind: str
    held: bool
    note: str = ""


def state_of(step: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Return the run's state after `step`: any byte of another step shows."""
    return {
        "model.w": torch.arange(scale * 4096, dtype=torch.float32).reshape(-1, 64) + step,
        "model.b": torch.full((37,), float(step), dtype=torch.float64),
        "optimizer.step": torch.tensor(step),
    }


def shards_of(tensors: dict[str, torch.Tensor]) -> list[TensorShard]:
    """Whole tensors as shards."""
    return [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]


def check(location: Any, least: int, scale: int = 1) -> int:
    """Load the newest state of a folder; its step. ValueError if it is not complete or older than `least`."""
    got = {name: torch.zeros_like(t) for name, t in state_of(0, scale).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = load(location, shards_of(got))
    step = int(state["step"])
    if step < least:
        raise ValueError(f"step {least} was reported as saved and step {step} was loaded")
    if not all(torch.equal(t, got[name]) for name, t in state_of(step, scale).items()):
        raise ValueError(f"the state loaded for step {step} is not that step's")
    return step


def strike(
    points: int, folder: Path, seed: int, report: Callable[[Blow], None], kinds: tuple[str, ...] = KINDS
) -> list[Blow]:
    """Deal `points` blows, kinds in turn, and check after each.

    Args:
        folder: an empty folder to work in.
        told: called after each blow.
    """
    rng = random.Random(seed)
    blows = []
    expected = [kinds[i % len(kinds)] for i in range(points)]
    run = ChaosRun(folder / "run", rng)
    try:
        for i, kind in enumerate(sorted(expected, key=kinds.index)):
            try:
                if kind in WITH_PROCESSES:
                    run.blow(kind)
                else:
                    _disk_blow(kind, folder / f"point-{i}", rng)
                blow = Blow(kind, True)
            except (ValueError, DataError, TrainingError, AssertionError, OSError) as error:
                blow = Blow(kind, False, str(error))
            blows.append(blow)
            report(blow)
        if any(kind in WITH_PROCESSES for kind in expected):
            blows.append(run.end())
            report(blows[-1])
    finally:
        run.kill()
    return blows


def _disk_blow(kind: str, folder: Path, rng: random.Random) -> None:
    """A few saves on a disk that fails somewhere; the folder is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as name:
        root = Path(name) / "disk"
        root.mkdir()
        if kind == "power cut":
            _power_cut(root, Path(name) / "after", rng)
        else:
            _failing_disk({"full disk": "full", "disk error": "error", "short write": "short"}[kind], root, rng)


def _power_cut(root: Path, target: Path, rng: random.Random) -> None:
    disk = JournalDisk(root)
    storage = LocalStorage(root, disk)
    returned = []  # (changes made when it returned, step)
    for step in (1, 2, 3, 3, 4):
        save_to_storage(storage, step, shards_of(state_of(step)), {"step": step}, _KEEP, Peers())
        returned.append((len(disk.journal), step))
    cut = rng.randint(returned[0][0], len(disk.journal))
    after_power_cut(disk.journal[:cut], root, target, rng)
    least = max(step for changes, step in returned if changes <= cut)
    step = check(target, least)
    # Saving continues over all remaining files.
    save_to_storage(LocalStorage(target), step + 1, shards_of(state_of(step + 1)), {"step": step + 1}, _KEEP, Peers())
    if check(target, step + 1) != step + 1:
        raise ValueError("a save after the power cut is not the newest")
    _tidy(target)


def _failing_disk(kind: str, root: Path, rng: random.Random) -> None:
    save_to_storage(LocalStorage(root), 1, shards_of(state_of(1)), {"step": 1}, _KEEP, Peers())
    disk = FaultyDisk(kind, rng.randint(1, 24))
    least = 1
    try:
        save_to_storage(LocalStorage(root, disk), 2, shards_of(state_of(2)), {"step": 2}, _KEEP, Peers())
        least = 2
    except TrainingError as error:
        if kind == "short":
            raise
        if kind == "full" and "full" not in str(error):
            raise
    check(root, least)
    save_to_storage(LocalStorage(root), 3, shards_of(state_of(3)), {"step": 3}, _KEEP, Peers())
    if check(root, 3) != 3:
        raise ValueError("a save after the failure is not the newest")
    _tidy(root)


def _tidy(root: Path) -> None:
    """ValueError if anything is left that no commit names."""
    storage = LocalStorage(root)
    for step in folders.list_steps(storage):
        commit = folders.read_commit(storage, step)
        names = set(storage.list(folders.step_name(step)))
        extra = names - set(commit.files if commit else ()) - {folders.COMMIT}
        extra = {name for name in extra if not name.startswith(("COMMIT.", ".metadata."))}
        if commit is None or extra:
            raise ValueError(f"step {step} has leftovers: {sorted(extra or names)}")


_context = multiprocessing.get_context("forkserver")


def _train(run: Path, reports: Any, scale: int) -> None:
    """Save every step in the background, tell what was committed; until killed."""
    torch.set_num_threads(1)
    tensors = {name: torch.zeros_like(t) for name, t in state_of(0, scale).items()}
    config = CheckpointConfig(background=True, keep=_KEEP, linger=10.0)
    checkpointer = Checkpointer(config, run, shards_of(tensors))
    state = checkpointer.load()
    step = int(state["step"]) if state else 0
    if state and not all(torch.equal(t, tensors[name]) for name, t in state_of(step, scale).items()):
        reports.send(("wrong", step, checkpointer.loaded_from))
    reports.send(("loaded", step, checkpointer.loaded_from))
    while True:
        checkpointer.before_update()
        step += 1
        for name, t in state_of(step, scale).items():
            tensors[name].copy_(t)
        checkpointer.save(step, {"step": step})
        time.sleep(0.002)
        for outcome in checkpointer.poll():
            reports.send(("committed" if outcome.committed else "failed", outcome.step, outcome.reason))


class ChaosRun:
    """A trainer that saves all the time, its service, and what it has reported."""

    def __init__(self, folder: Path, rng: random.Random, scale: int = 64) -> None:
        self.folder = folder
        self.rng = rng
        self.scale = scale
        self.reported = 0
        self.child: Any = None
        self.reports: Any = None

    def start(self) -> None:
        """Start the trainer if it is not running."""
        if self.child is None or not self.child.is_alive():
            self.folder.mkdir(parents=True, exist_ok=True)
            _context.set_forkserver_preload(["torch", "megascale.checkpoint.checkpointer"])
            self.reports, sender = _context.Pipe(duplex=False)
            self.child = _context.Process(target=_train, args=(self.folder, sender, self.scale), daemon=True)
            self.child.start()
            sender.close()
            self._receive(("loaded",))

    def _receive(self, expected: tuple[str, ...], seconds: float = 60.0) -> None:
        """Take reports in until one is of a wanted kind."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.reports.poll(0.1):
                continue
            kind, step, note = self.reports.recv()
            if kind == "wrong":
                raise ValueError(f"the trainer loaded a wrong state for step {step} from {note}")
            if kind == "committed":
                self.reported = max(self.reported, step)
            if kind in expected:
                return
        raise ValueError(f"the trainer reported none of {expected} in {seconds:g} s")

    def _drain(self) -> None:
        with suppress(EOFError, OSError):
            while self.reports.poll(0):
                kind, step, _ = self.reports.recv()
                self.reported = max(self.reported, step) if kind == "committed" else self.reported

    @contextmanager
    def _service(self) -> Iterator[int]:
        sock = service.connect_checkpoint_service(service_protocol.private_folder(self.folder), 10.0)
        try:
            yield sock.request(Register()).pid
        finally:
            sock.close()

    def blow(self, kind: str) -> None:
        """Let it save, strike, check what is left."""
        self.start()
        self._receive(("committed",))
        time.sleep(self.rng.uniform(0, 0.03))  # the random moment
        if kind in ("service", "both"):
            with self._service() as pid:
                os.kill(pid, signal.SIGKILL)
        if kind in ("trainer", "both", "clock"):
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.join()
        if kind == "hang":
            with self._service() as pid:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.05, 0.3))
                os.kill(pid, signal.SIGCONT)
        self._drain()
        if kind == "clock":
            moments = [0, time.time() - 1e6, time.time() + 1e6]
            for path in self.folder.rglob("*"):
                with suppress(FileNotFoundError):
                    os.utime(path, (self.rng.choice(moments),) * 2)
        if kind in ("service", "hang"):
            self._receive(("committed",))  # the trainer finds its way without help
        self._check()

    def _check(self) -> None:
        """A live run may prune what is being read; then the newer one is there."""
        for attempt in range(5):
            self._drain()
            try:
                check(self.folder / "checkpoints", self.reported, self.scale)
                return
            except DataError:
                if attempt == 4 or self.child is None or not self.child.is_alive():
                    raise

    def end(self) -> Blow:
        """Stop everything in order and look for what should be gone."""
        with self._service() as pid:
            pass
        if self.child is not None and self.child.is_alive():
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.join()
        sock = service.connect_checkpoint_service(service_protocol.private_folder(self.folder), 10.0)
        sock.request(Goodbye())
        sock.close()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if Path(f"/proc/{pid}").exists():
            return Blow("leaks", False, f"the service {pid} did not end")
        storage = LocalStorage(self.folder / "checkpoints")
        present, good = folders.list_steps(storage), folders.steps(storage)
        # Files of the last, unfinished save may stay until the next save.
        if len(good) > _KEEP or len(present) > _KEEP + 1:
            return Blow("leaks", False, f"steps {present} are there, {good} of them committed, {_KEEP} wanted")
        return Blow("leaks", True)

    def kill(self) -> None:
        """Leave no process behind, with any outcome."""
        if self.child is not None and self.child.is_alive():
            self.child.kill()
            self.child.join()
        sock_path = service_protocol.private_folder(self.folder) / "checkpoint.sock"
        if sock_path.exists():
            with suppress(OSError, TrainingError), self._service() as pid:
                os.kill(pid, signal.SIGKILL)
