"""The live stream: what fails while a run is looked at is told to its pages, and the look goes on."""

from __future__ import annotations

import asyncio

from megascale.observe.dashboard import application
from megascale.observe.dashboard.application import LiveUpdates


def test_a_look_that_fails_in_any_way_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(application, "PULSE_SECONDS", 0.0)
    answers = iter([b'{"rows": 1}', ValueError("of no kind that was expected"), b'{"rows": 2}'])

    async def pulse(name: str) -> bytes:
        answer = next(answers, None)
        if answer is None:
            await asyncio.sleep(60.0)
        if isinstance(answer, Exception):
            raise answer
        return answer or b""

    async def watch() -> list[bytes]:
        stream = LiveUpdates(pulse).stream(["a"])
        async with asyncio.timeout(30.0):
            report = [await anext(stream) for _ in range(4)]
        await stream.aclose()
        return report

    _, first, failed, then = asyncio.run(watch())
    assert b'"rows": 1' in first
    assert b"the run cannot be read: ValueError" in failed
    assert b'"rows": 2' in then
    assert "the check of run a failed (ValueError: of no kind that was expected)" in caplog.text
