"""`python -m tests.chaos loader`: a training whose loader and workers are killed at random moments, N times in all.

Two ranks of a tensor-parallel group train on text that is tokenised on the fly. A killed loader is started again by
the ranks; after a killed worker the whole run is started again and goes on from its newest checkpoint, half of the time
with the loader killed too, whose segment the next start must reap. Most kills fall some steps after the one before,
at any place within a step; some fall at any time, while processes are coming up. The ledger and every loss must be
those of the undisturbed run, bit for bit; a run that ends before all kills are dealt is followed by another,
which counts its text anew.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.layout import lay_out
from megascale.data.loader import host_loader, ring

_RANKS = 2
_WORKERS = 0.25  # of the kills are of workers
_ANY_TIME = 0.15  # of the kills fall at any time, not only in training
_STEPS = 12  # at most so many steps between kills
_END = 60.0  # seconds in which a process ends that was killed or has lost its ranks
_context = multiprocessing.get_context("forkserver")


def run_chaos(folder: Path, kills: int, seed: int, console: Any, steps: int = 300) -> dict[str, Any]:
    """Deal the kills; a record for JSON, `equal` where nothing was lost, repeated or changed."""
    _context.set_forkserver_preload(["megascale.train.loop", "megascale.api", "tokenizers"])
    _sources(folder)
    rng = random.Random(seed)
    began = time.monotonic()
    calm = _Run(folder, "calm", steps, rng)
    calm.train(0, console)
    expected = calm.story()
    dealt = {"loader": 0, "worker": 0}
    rounds = 0
    attempts = 0
    restarts = 0
    training = 0
    faults: list[str] = []
    while sum(dealt.values()) < kills:
        run = _Run(folder, f"round-{rounds}", steps, rng)
        run.train(kills - sum(dealt.values()), console)
        story = run.story()
        for step, (got, due) in enumerate(zip(story, expected, strict=False), 1):
            if got != due:
                faults.append(f"round {rounds}, step {step}: {got} where the undisturbed run has {due}")
                break
        if len(story) != len(expected):
            faults.append(f"round {rounds} has {len(story)} steps where the undisturbed run has {len(expected)}")
        for kind, count in run.dealt.items():
            dealt[kind] += count
        rounds = rounds + 1
        attempts = attempts + run.attempts
        restarts = restarts + run.restarts()
        training += run.in_training
        console.print(f"round {rounds}: {run.dealt} in {run.attempts} starts; {'equal' if not faults else faults[-1]}")
    remaining = _list_segments(folder)
    deadline = time.monotonic() + _END
    while remaining and time.monotonic() < deadline:
        time.sleep(0.05)  # a loader that was coming up as its ranks were killed ends by itself
        remaining = _list_segments(folder)
    if remaining:
        faults.append(f"segments are left: {', '.join(remaining)}")
    console.print(
        f"{sum(dealt.values())} kills ({dealt['loader']} of the loader, {dealt['worker']} of workers; {training} while "
        f"it trained, the others in start-up) in {rounds} runs of {steps} steps and {attempts} starts: ledger and "
        f"losses {'equal, bit for bit' if not faults else 'DIFFER'}"
    )
    return {
        "kills": dealt,
        "kills_in_training": training,
        "runs": rounds,
        "starts": attempts,
        "restarts_seen_by_rank_0": restarts,
        "steps": steps,
        "equal": not faults,
        "faults": faults,
        "seconds": time.monotonic() - began,
    }


def _list_segments(folder: Path) -> list[str]:
    """Return the shared memory of the runs in `folder`."""
    return [
        str(path) for path in ring.MOUNT.glob(f"{ring.get_segment_prefix()}*") if str(folder).encode() in _head(path)
    ]


def _kill_and_wait(pid: int) -> None:
    """Kill a process and wait for its end: the next start takes the memory of processes that have ended only."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], _END)
    finally:
        os.close(descriptor)


def _head(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()[:512]
    return b""


def _sources(folder: Path) -> None:
    """A tokenizer and some text, half as jsonl, half as parquet."""
    import pyarrow
    import pyarrow.parquet

    from megascale.data.prepare.stdlib import read_stdlib
    from megascale.data.tokenizer.tokenizer import train_tokenizer

    texts = list(read_stdlib().values())[:120]
    train_tokenizer(texts[:40], 512).save(folder / "tokenizer.json")
    (folder / "text").mkdir()
    with open(folder / "text" / "a.jsonl", "w") as file:
        file.writelines(strict_json.dumps({"text": text}) + "\n" for text in texts[:60])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[60:]}), folder / "text" / "b.parquet", row_group_size=5)


class _Run:
    """One run folder, trained to its end through however many starts."""

    def __init__(self, folder: Path, name: str, steps: int, rng: random.Random) -> None:
        from megascale import config

        self.rng = rng
        self.dealt = {"loader": 0, "worker": 0}
        self.attempts = self.in_training = 0
        self.config = config.from_tree(
            {
                "model": {
                    "layers": 2,
                    "hidden": 32,
                    "heads": 4,
                    "sequence_length": 16,
                    "vocab_size": 512,
                },
                "data": {
                    "train": [str(folder / "text")],
                    "tokenizer": str(folder / "tokenizer.json"),
                    "shuffle_tokens": 4000,
                    "ring_steps": 2,
                },
                "parallel": {"tensor": _RANKS},
                "train": {
                    "runs": str(folder / name),
                    "name": "run",
                    "steps": steps,
                    "micro_batch": 2,
                    "global_batch": 4,
                    "log_interval": 1000,
                    "device": "cpu",
                    "threads": 1,
                },
                "checkpoint": {"interval": 10, "at_end": False},
                "observe": {"tensorboard": False, "progress": False},
            }
        )

    def train(self, kills: int, console: Any) -> None:
        """Start it again and again until it is finished; at most `kills` kills."""
        while True:
            self.attempts += 1
            loader = host_loader.start_loader(lay_out(self.config, _RANKS), first_rank=0, ranks=_RANKS)
            assert loader is not None
            ranks = self._start(loader.environment)
            killed = False
            try:
                killed = self._disturb(loader.folder, ranks, kills)
                for process in ranks:
                    if killed:
                        process.kill()  # the others may wait for the dead one for minutes, as launchers know
                    process.join()
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
                pid = host_loader.find_owner(loader.folder)
                if killed and pid is not None and self.rng.random() < 0.5:
                    _kill_and_wait(pid)  # a crash of the whole host: the next start reaps what is left
                else:
                    loader.stop()
            if killed:
                continue
            bad = [process.exitcode for process in ranks if process.exitcode]
            if bad:
                tail = (self.config.run_folder / "logs" / "chaos.log").read_text().splitlines()[-20:]
                raise RuntimeError("\n".join([f"ranks ended with {bad} although they were not killed"] + tail))
            return

    def _start(self, environment: dict[str, str]) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        tree = self.config.model_dump(mode="json", exclude_none=True)
        built = []
        for rank in range(_RANKS):
            variables = environment | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(_RANKS),
                "LOCAL_WORLD_SIZE": str(_RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = _context.Process(target=_rank, args=(tree, variables))
            process.start()
            built.append(process)
        return built

    def _disturb(self, folder: Path, ranks: list[Any], kills: int) -> bool:
        """Kill at random moments until a worker was hit (True), the ranks have ended or all kills are dealt."""
        rng, began = self.rng, False
        while sum(self.dealt.values()) < kills:
            if rng.random() < _ANY_TIME:
                multiprocessing.connection.wait([process.sentinel for process in ranks], rng.uniform(0.0, 2.0))
            else:
                began |= self._let_train(ranks, rng.randint(1, _STEPS), rng.uniform(0.0, 0.05))
            if any(process.exitcode is not None for process in ranks):
                return False
            if rng.random() < _WORKERS:
                self._kill(rng.choice(ranks).pid, "worker", began)
                return True
            pid = host_loader.find_owner(folder)
            if pid is not None:
                with suppress(ProcessLookupError):
                    self._kill(pid, "loader", began)
        return False

    def _kill(self, pid: int, kind: str, training: bool) -> None:
        os.kill(pid, signal.SIGKILL)
        self.dealt[kind] += 1
        self.in_training += training

    def _let_train(self, ranks: list[Any], steps: int, more: float) -> bool:
        """Wait until so many steps are done and `more` seconds on, or the ranks have ended (False)."""
        sentinels = [process.sentinel for process in ranks]
        observed = self._steps()
        done = 0
        while done < steps:
            if multiprocessing.connection.wait(sentinels, 0.003):
                return False
            current = self._steps()
            done, observed = (
                done + max(0, current - observed),
                current,
            )  # a start drops the lines of steps that it does again
        return not multiprocessing.connection.wait(sentinels, more)

    def _steps(self) -> int:
        with suppress(FileNotFoundError):
            return (self.config.run_folder / "samples" / "ledger.jsonl").read_bytes().count(b"\n")
        return 0

    def story(self) -> list[tuple[Any, ...]]:
        """Return for each step its samples in the ledger, the samples that ranks have read, loss and gradient norm."""
        run = self.config.run_folder
        ledger = [json.loads(line) for line in (run / "samples" / "ledger.jsonl").read_text().splitlines()]
        losses = [strict_json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [
            tuple(a.values()) + (b["step"], b["loss"].hex(), b["grad_norm"].hex())
            for a, b in zip(ledger, losses, strict=True)
        ]

    def restarts(self) -> int:
        """Restarts of the loader in the run's events."""
        return (self.config.run_folder / "events.jsonl").read_text().count('"loader_restarted"')


def _rank(tree: dict[str, Any], variables: dict[str, str]) -> None:
    """A rank of the training, told apart by its environment."""
    os.environ.update(variables)
    from megascale import api
    from megascale import config as configuration
    from megascale.errors import MegascaleError

    config = configuration.from_tree(tree)
    (config.run_folder / "logs").mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = open(config.run_folder / "logs" / "chaos.log", "a", buffering=1)  # noqa: SIM115
    for standard in (1, 2):  # torch's own complaints about dead peers too
        os.dup2(sys.stderr.fileno(), standard)
    try:
        api.train(config)
    except MegascaleError as error:
        print(f"rank {variables['RANK']}: {error}")
        os._exit(error.exit_code)
