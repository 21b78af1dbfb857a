"""Diagnosis of a hang: from ranks without progress to the rank that causes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zlib

import pytest

from megascale.core.calls import Call, CallLog, CallRecord
from megascale.errors import DataError
from megascale.observe.hang.scene import MAX_EVIDENCE_BYTES, RankEvidence, Scene, pack_evidence, unpack_evidence
from megascale.resilience.agent.agent import collect_rank_evidence
from megascale.resilience.driver.diagnosis.diagnosis import refine_hang
from megascale.resilience.protocol.agent_messages import FROM_AGENT, Explain
from megascale.resilience.rules.view import Verdict
from tests.resilience.rules.views import heartbeat, view, worker

ORDER = Explain(1, 7, 100, 0.1)
HANG = Verdict("hang", (), (), "recover", ("no rank has moved for 11 s",))


@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_a_hang_gets_its_rank_and_its_node(tmp_path):
    """Rank 1 is a stopped process; rank 0, here, waits for it."""
    status = tmp_path / "status"
    local = CallLog(status, 0, 2)
    local.register_group("world", 2)
    local.begin_wait(local.begin_call("world", "all_reduce", 24))
    code = f"""
import os, signal
from pathlib import Path
from megascale.core.calls import Call, CallLog, CallRecord
from megascale.observe.hang.scene import RankEvidence, Scene
log = CallLog(Path({str(status)!r}), 1, 2)
log.register_group("world", 2)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    second = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.waitpid(second.pid, os.WUNTRACED)
        # This process has no handler for the signal that asks for a stack.
        old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        state = view({n: [heartbeat(n, 1, [worker(n, status_age=11.0)])] for n in range(2)})
        sent = [
            FROM_AGENT.decode(FROM_AGENT.encode(e))
            for e in collect_rank_evidence(tmp_path, (0, 1), ORDER, must_store=False)
        ]
        assert [(e.order, e.rank) for e in sent] == [(7, 0), (7, 1)]
        scene = Scene({e.rank: unpack_evidence(e.data) for e in sent}, 2)
        result = refine_hang(HANG, state, scene, None)
        signal.signal(signal.SIGUSR2, old)
    finally:
        second.kill()
        second.wait()
        local.close()
    assert (result.nodes, result.ranks, result.action) == (("node-1",), (1,), "recover")
    assert result.evidence[0].startswith("stopped: rank 1, all_reduce number 1 of world")
    assert result.evidence[-1] == HANG.evidence[0]


def test_ranks_that_left_no_record_keep_the_verdict(tmp_path):
    (sent,) = collect_rank_evidence(tmp_path, (0,), ORDER, must_store=False)
    assert not sent.data
    result = refine_hang(HANG, view({0: [heartbeat(0, 1, [worker(0)])]}), Scene({}, 1), None)
    assert (result.action, result.ranks) == ("recover", ())
    assert "the hang was not examined" in result.evidence[-1]


def test_evidence_of_a_rank_is_cut_to_a_message_and_nonsense_is_none():
    rng = random.Random(0)
    calls = tuple(Call(f"group-{rng.random()}", n, "send", n) for n in range(20_000))
    subject = RankEvidence(3, "running", None, CallRecord(3, 1, 4, calls=calls), True, ("forward (x.py:1)",))
    packed = pack_evidence(subject, history=20_000)
    assert 0 < len(packed) <= MAX_EVIDENCE_BYTES
    result = unpack_evidence(packed)
    assert (result.rank, result.process, result.stack) == (3, "running", ("forward (x.py:1)",))
    retained = len(result.record.calls)
    assert 0 < retained < len(calls)
    assert result.record.calls == calls[-retained:]
    assert not result.record.is_complete
    for nonsense in (
        b"",
        b"x" * 100,
        zlib.compress(b"[1, 2]"),
        packed[: len(packed) // 2],
        zlib.compress(bytes(1 << 27)),
    ):
        with pytest.raises(DataError):
            unpack_evidence(nonsense)
