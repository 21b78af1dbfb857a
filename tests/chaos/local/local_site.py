"""Faults of jobs on this machine: two nodes and a spare are processes, one fault per run."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.launched import Launched, Steps, make, phases
from tests.chaos.faults.site import FaultSite, Row, Weights, equal_weights
from tests.chaos.local.driver_faults import STRIKES
from tests.chaos.local.fault_cases import CASES, FaultCase


class LocalSite(FaultSite):
    """Two ranks on two nodes of this machine, with one spare; every step is copied to a peer's memory."""

    name = "local"
    kinds = CASES

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = make(folder)

    @classmethod
    def find_problem_of(cls, kind: str) -> str:
        """See FaultSite."""
        case = CASES[kind]
        if case.redis and shutil.which("redis-server") is None:
            return "redis-server is not installed"
        if case.own_network and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
            return "this machine does not permit network namespaces"
        return ""

    def run_once(self, kind: str, name: str) -> Row:
        """See FaultSite."""
        case, number = CASES[kind], int(name.rpartition("-")[2])
        expected = self.reference.after(case.steps) if case.same else {}
        tested = str(case.spare).lower()
        arguments = [f"--train.steps={case.steps}", f"--resilience.test_spares={tested}"] + list(case.words)
        with _redis(case.redis) as more:
            job = Launched(self._file, name, arguments + more, own_network=case.own_network)
            try:
                return _strike(job, kind, case, number, expected)
            finally:
                job.end(0.1)


@contextmanager
def _redis(expected: bool) -> Iterator[list[str]]:
    """A Redis server of our own on a free port; the words that make a job use it."""
    if not expected:
        yield []
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield [f"--rendezvous.url=redis://127.0.0.1:{port}"]
    finally:
        server.kill()
        server.wait()


def _strike(job: Launched, kind: str, case: FaultCase, number: int, expected: Weights) -> Row:
    from megascale.resilience.faults.inject import Options, inject

    started = job.first(lambda e: e.kind == "first_step")
    if case.spare:
        job.first(lambda e: e.kind == "node_diagnosed")
    time.sleep(0.7 + 0.21 * number)  # the fault falls on another step each time
    options = Options(**dict(case.options))
    if kind == "slow-link":
        time.sleep(3.0)  # steps to compare with
        options = Options(node="n1", seconds=25.0)
    locations = next((e.nodes for e in reversed(job.events()) if e.kind == "attempt_started"), ())
    if options.node is not None and locations and options.node not in locations:
        options = replace(options, node=locations[-1])  # a start on a busy machine may have gone to the spare
    injected = time.time()
    steps = Steps(job)
    failed: list[BaseException] = []

    def inject_it() -> None:
        try:
            if kind in STRIKES:
                STRIKES[kind](job)
            else:
                inject(job.run, case.kind or kind, options)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=inject_it)  # some faults take a while
    if kind in STRIKES:
        # The job recovers meanwhile, so that its step does not show afterwards how far it had come.
        with steps:
            thread.start()
            thread.join()
    else:
        thread.start()
    if kind == "kill-driver":
        thread.join()
        job.process.wait()
        job.start()
    actions = ("recover", "evict", "diagnose", "stop")
    hard = None
    if case.ends == "recover":
        hard = job.first(lambda e: e.time > injected and e.action in actions)
    done = job.step()  # before the next attempt begins
    if kind in STRIKES:
        restart = next((e.time for e in job.events() if e.time > injected and e.kind == "attempt_started"), injected)
        done = steps.count_until(restart)
    verdict = job.first(lambda e: e.time > injected and e.kind in case.verdicts) if case.verdicts else None
    hard = hard or next((e for e in job.events() if e.time > injected and e.action in actions), verdict)
    repeated = None
    if case.ends == "recover" and verdict is not None:
        repeated = job.first(lambda e: e.kind == "first_step" and e.time > injected)
    elif kind in ("kill-driver", "garbled-journal"):
        repeated = job.first(lambda e: e.kind == "node_joined" and e.time > injected)
    code = job.end()
    thread.join()
    row = phases(job, injected, hard, repeated if case.ends == "recover" else None)
    row["total"] = repeated.time - injected if repeated else None
    events = [e for e in job.events() if e.time > injected]
    equal = not expected or code != 0 or equal_weights(job.weights(), expected)
    result = sorted({e.kind for e in events if e.kind in case.verdicts})
    right = not failed and started is not None and (bool(result) or not case.verdicts)
    if case.ends == "stop":
        person = next((e for e in events if e.action == "stop" and e.details.get("person")), None)
        right = right and code == 1 and person is not None
    else:
        attempts = sum(e.kind == "attempt_started" for e in events)
        right = right and code == 0 and (not case.same or equal) and (case.ends == "recover") == bool(attempts)
    resumed = row.pop("resumed_from")
    lost = max(0, done - int(resumed)) if case.ends == "recover" and resumed is not None else None
    return {
        "right": right,
        "exit_code": code,
        "same": equal if case.same and code == 0 else None,
        "lost": lost,
        **row,
        "actions": [e.action for e in events if e.kind == "recovery_action"],
        "verdicts": result,
        "evidence": list(verdict.evidence)[:2] if verdict else [],
        "failed": [str(error) for error in failed],
        # Messages in place of the expected ones.
        "events": []
        if right
        else [f"{e.time - injected:.2f} s {e.kind}: {'; '.join(e.evidence)[:300]}" for e in events],
    }
