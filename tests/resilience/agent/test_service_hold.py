"""Hold of a node's checkpoint service by its agent."""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.checkpoint.background.service_protocol import FROM_SERVICE, TO_SERVICE, locate_service, private_folder
from megascale.resilience.agent.service_hold import ServiceHold
from megascale.services.connection_server import ConnectionServer
from megascale.services.conversation import Conversation
from megascale.services.host_service import ReadySignal, claim_service

NODE = "n0"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectionServer]:
    """A service at the location of the node's checkpoint service, whose clients send nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def serve_client(client: Conversation) -> None:
        client.receive()

    location = locate_service(private_folder(tmp_path, NODE))
    claimed = claim_service(location, lambda: serve_client, (FROM_SERVICE, TO_SERVICE), ReadySignal(None, None))
    assert claimed is not None
    must_end = threading.Event()
    thread = threading.Thread(target=claimed.server.serve, args=(must_end.is_set,))
    thread.start()
    try:
        yield claimed.server
    finally:
        must_end.set()
        thread.join()
        location.release(claimed.lock)
        claimed.server.stop()


def await_clients(server: ConnectionServer, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while server.client_count != count:
        assert time.monotonic() < deadline, server.client_count
        time.sleep(0.005)


@pytest.mark.parametrize("is_released", [False, True])
def test_a_release_ends_a_hold_that_is_still_connecting(
    is_released: bool, server: ConnectionServer, tmp_path: Path
) -> None:
    hold = ServiceHold(tmp_path, NODE, seconds=600.0)

    async def renew() -> None:
        with open(locate_service(private_folder(tmp_path, NODE)).starting_lock_path, "ab") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)  # the thread waits for this lock
            task = asyncio.create_task(hold.renew())
            await asyncio.sleep(0)
            if is_released:
                hold.release()
        await task
        await asyncio.to_thread(await_clients, server, 0 if is_released else 1)
        assert server.has_had_clients
        hold.release()
        await asyncio.to_thread(await_clients, server, 0)

    asyncio.run(renew())
