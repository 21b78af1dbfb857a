"""What strangers cost a job that trains: floods, slow senders, malformed frames, long bodies, files that lie.

Every port of the job's services is attacked in turn while it trains; the steps go on, and its weights in the end are
those of an undisturbed run.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json

if TYPE_CHECKING:
    from benchmarks.harness.launched import Launched
    from tests.chaos.hostile.files import FileCost

MIB = 64.0  # most that an attack may cost a process
HEARTBEAT = 1.0  # seconds (resilience.interval): most that it may cost the training or the driver
_NOBODY_UID = 65534


@dataclass(frozen=True)
class OwnerAnswers:
    """Questions of the job's owner to the API while something went on.

    Attributes:
        asked, unanswered: how many questions, and of those how many that an attacker pushed out.
        median, p99, most: seconds to the answer, of those that were answered.
    """

    asked: int
    unanswered: int
    median: float
    p99: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float], unanswered: int) -> OwnerAnswers:
        """Return the cost from the seconds of each answer, without a number if there was none."""
        result = sorted(seconds) or [math.nan]
        p99 = result[int(0.99 * (len(result) - 1))]
        return OwnerAnswers(len(seconds) + unanswered, unanswered, result[len(result) // 2], p99, result[-1])


@dataclass(frozen=True)
class AttackCost:
    """Cost of an attack on a port.

    Attributes:
        attack, port: which; the port by who listens there.
        did: what the attacker got done.
        mib: the most memory that the process took above what it had.
        step: longest time between two steps, seconds above the longest of a quiet time before.
        answer: longest time in which the driver gave its owner no answer, seconds, as `step`; on its API too.
        asked: what the owner's questions came to meanwhile, each asked 0.1 s after the one before.
    """

    attack: str
    port: str
    did: str
    mib: float
    step: float
    answer: float
    asked: OwnerAnswers

    @property
    def held(self) -> bool:
        """Within what it may cost."""
        return self.mib <= MIB and self.step <= HEARTBEAT and self.answer <= HEARTBEAT


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos hostile`."""
    app.command("hostile")(hostile)


def hostile(
    seconds: float = typer.Option(5.0, min=0.5, help="How long each attack goes on."),
    files: bool = typer.Option(True, help="Also read crafted checkpoints and models."),
    out: Path = typer.Option(Path("bench-hostile.json"), help="JSON file for the figures."),
) -> None:
    """Attack a launched job as a stranger would, and print what each attack cost in memory and time.

    A tiny model, two ranks on two nodes, one spare, on CPU. Each port of the driver and of the host's services gets
    floods, slow senders and malformed frames; the API long bodies too; files of another user stand where services put
    theirs (as root only). The job must go on with the steps and weights of a quiet run, without a restart. Crafted
    checkpoints and Hugging Face folders must be refused. Exit 1 if anything cost more than 64 MiB or one heartbeat.

    Example: python -m tests.chaos hostile --seconds 5
    """
    from rich.console import Console
    from rich.table import Table

    from benchmarks.harness.launched import make
    from megascale.errors import TrainingError

    console = Console(highlight=False, soft_wrap=True)
    with temporary_folder(prefix="megascale-hostile-") as name:
        folder = Path(name)
        file = make(folder)
        with _planted() as planted:
            costs, wrong, facts = _attack(file, seconds, console)
        console.print(f"{planted} files of another user stood in shared memory")
        facts["planted"] = planted
        read = _files(folder, console) if files else []
    heads = ("attack", "port", "MiB", "step late, s", "answer late, s", "answers: median, p99, s", "unanswered")
    table = Table(*heads, title="hostile: what it cost the job and its owner")
    for cost in costs:
        late, requested = (f"{cost.step:.2f}", f"{cost.answer:.2f}"), cost.asked
        waited = (f"{requested.median:.3f}, {requested.p99:.3f}", f"{requested.unanswered} of {requested.asked}")
        table.add_row(cost.attack, cost.port, f"{cost.mib:.1f}", *late, *waited)
    console.print(table)
    wrong += [
        f"{c.attack} on {c.port}: {c.mib:.0f} MiB, step {c.step:.1f} s, answer {c.answer:.1f} s late"
        for c in costs
        if not c.held
    ]
    wrong += [f"{c.name}: {c.said or f'{c.mib:.0f} MiB'}" for c in read if not c.refused or c.mib > MIB]
    if read:
        worst = max(read, key=lambda c: c.mib)
        console.print(f"{len(read)} crafted files, the dearest {worst.name}: {worst.mib:.0f} MiB")
    details: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    details |= {
        "machine": platform.processor() or platform.machine(),
        "load": list(os.getloadavg()),
        "seconds": seconds,
    }
    details |= facts | {"attacks": [asdict(c) for c in costs], "files": [asdict(c) for c in read], "wrong": wrong}
    out.write_text(strict_json.dumps(details, indent=1))
    console.print(f"figures: {out}")
    if wrong:
        raise TrainingError("; ".join(wrong))


def _attack(file: Path, seconds: float, console: Any) -> tuple[list[AttackCost], list[str], dict[str, Any]]:
    """All attacks on a job, and what is wrong with it afterwards."""
    import torch

    from benchmarks.harness.launched import Launched
    from megascale.checkpoint import latest
    from tests.chaos.hostile.attacks import ATTACKS
    from tests.chaos.hostile.job_processes import RANK, ports

    # A constant rate, so that the length of a run changes nothing before its end.
    arguments = ["--checkpoint.interval=20", "--data.loader=host", "--lr.schedule=constant"]
    job = Launched(file, "attacked", arguments + ["--train.steps=1000000"], pace=0.05)
    costs: list[AttackCost] = []
    wrong: list[str] = []
    calm: Launched | None = None
    try:
        if job.first(lambda entry: entry.kind == "first_step") is None:
            return [], [f"the job did not start: {job.output.read_text()[-2000:]}"], {}
        with _watch(job) as quiet:
            time.sleep(seconds)
        open_ports = ports(job.process.pid)
        api = _api_port(job)
        observed: set[tuple[str, str]] = set()
        for port in sorted(open_ports, key=lambda p: (p.role, p.address[1])):
            is_api = port.role == "driver" and port.address[1] == api
            named = "driver's API" if is_api else "driver's agents" if port.role == "driver" else port.role
            for attack in ATTACKS:
                # What speaks torch's own protocols is not kept by us: docs/security.md says what keeps it.
                foreign = port.role == RANK and attack.frames
                if foreign or (attack.http and not is_api) or (attack.name, named) in observed:
                    continue
                observed.add((attack.name, named))
                costs.append(_measure_attack(job, port, named, attack, seconds, quiet))
                console.print(f"{attack.name} on {named}: {costs[-1].mib:.1f} MiB, {costs[-1].did}")
                if job.process.poll() is not None:
                    return costs, [f"{attack.name} on {named} ended the job"], {}
        job.process.send_signal(signal.SIGINT)
        job.end()
        attempts = [e for e in job.events() if e.kind == "attempt_started"]
        if len(attempts) != 1:
            wrong.append(f"the job was started {len(attempts)} times")
        step = latest(job.run / "checkpoints")
        calm = Launched(file, "calm", arguments + [f"--train.steps={step}"], pace=0.001)
        code = calm.end()
        if code or latest(calm.run / "checkpoints") != step:
            wrong.append(f"the quiet run ended with {code} at step {latest(calm.run / 'checkpoints')}, not {step}")
        else:
            ours, theirs = job.weights(), calm.weights()
            if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
                wrong.append("the weights are not those of a quiet run")
        calm_answers = OwnerAnswers.of(quiet.answers, quiet.unanswered)
        facts = {"steps": step, "quiet_step": quiet.step, "quiet_answers": asdict(calm_answers)}
        console.print(f"owner's answers in quiet: median {calm_answers.median:.3f} s, p99 {calm_answers.p99:.3f} s")
        console.print(f"{step} steps in one attempt")
        return costs, wrong, facts
    finally:
        for each in (job, calm):
            if each is not None and each.process.poll() is None:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()


def _measure_attack(job: Launched, port: Any, named: str, attack: Any, seconds: float, quiet: Watched) -> AttackCost:
    from tests.chaos.hostile.job_processes import forget_most, memory

    forget_most(port.pid)
    before, _ = memory(port.pid)
    with _watch(job) as observed:
        did = attack.run(port.address, seconds)
    _, most = memory(port.pid)
    step = max(0.0, observed.step - quiet.step)
    answer = max(0.0, observed.answer - quiet.answer)
    requested = OwnerAnswers.of(observed.answers, observed.unanswered)
    return AttackCost(attack.name, named, did, max(0, most - before) / 2**20, step, answer, requested)


@dataclass
class Watched:
    """step, answer: the longest time, in seconds, without a step, and without an answer to the driver's owner;
    answers: seconds to each answer; unanswered: questions that found none."""

    step: float = 0.0
    answer: float = 0.0
    answers: list[float] = field(default_factory=list)
    unanswered: int = 0


@contextmanager
def _watch(job: Launched) -> Iterator[Watched]:
    """Look at steps and answers all the while."""
    result, over = Watched(), threading.Event()

    def steps() -> None:
        last, start = job.step(), time.monotonic()
        while not over.wait(0.01):
            current, at = time.monotonic(), job.step()
            result.step = max(result.step, current - start)
            if at != last:
                last, start = at, current

    def answers() -> None:
        from megascale.errors import MegascaleError
        from megascale.resilience.driver.api.client import send_request

        start = time.monotonic()
        while not over.wait(0.1):
            began = time.monotonic()
            try:
                send_request(job.run, "GET", "/v1/job")
                start = began
                result.answers.append(time.monotonic() - began)
            except MegascaleError:
                result.unanswered += 1
            result.answer = max(result.answer, time.monotonic() - start)
            start = time.monotonic() if start == began else start

    threads = [threading.Thread(target=steps), threading.Thread(target=answers)]
    for thread in threads:
        thread.start()
    try:
        yield result
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _api_port(job: Launched) -> int:
    from urllib.parse import urlsplit

    from megascale.resilience.protocol.contact import read_contact

    return urlsplit(read_contact(job.run).api).port or 0


@contextmanager
def _planted() -> Iterator[int]:
    """Files of another user where the loaders of this one have theirs, under such names; how many."""
    from megascale.data.loader.ring import MOUNT, get_segment_prefix
    from tests.chaos.hostile.attacks import plant

    names = [f"{get_segment_prefix()}{number:016x}" for number in range(20)]
    built = plant(str(MOUNT), names, _NOBODY_UID) if not os.geteuid() else 0
    try:
        yield built
    finally:
        for name in names if built else ():
            (MOUNT / name).unlink(missing_ok=True)


def _files(folder: Path, console: Any) -> list[FileCost]:
    from tests.chaos.hostile.files import FileCost

    location = folder / "crafted"
    location.mkdir()
    sound = folder / "runs" / "calm"
    arguments = [sys.executable, "-m", "tests.chaos.hostile.files", str(location), str(sound)]
    result = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result.append(FileCost(**json.loads(line)))
            if not result[-1].refused:
                console.print(f"{result[-1].name}: {result[-1].said}", markup=False)
    return [cost for cost in result if cost.name != "sound"]
