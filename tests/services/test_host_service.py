"""Life of a service: any client finds or starts it, one per folder. It ignores strangers and ends with its clients."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.services import connection_server, host_service
from megascale.services import conversation as talking
from megascale.services.connection_server import ConnectionServer
from megascale.services.conversation import Conversation
from megascale.services.framing import HEAD, ProtocolError, make_greeting, make_head
from megascale.services.host_service import Launch, ServiceFailed
from megascale.services.service_location import ServiceLocation
from tests.services.echo_service import SCHEMA, Echo, talk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def location(tmp_path: Path) -> Iterator[ServiceLocation]:
    service = ServiceLocation(tmp_path / "echo", "echo")
    yield service
    pid = service.find_service_pid()
    if pid:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than select() can tell apart."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"needs 1,200 open files, and ulimit -Hn is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    yield
    for number in opened:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def launch(location: ServiceLocation, word: str = "60") -> Launch:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return Launch(
        "tests.services.echo_service",
        [str(location.folder), word],
        location.folder.parent / "log",
        {"PYTHONPATH": path},
    )


def connect(location: ServiceLocation, word: str = "60", seconds: float = 60.0) -> Conversation:
    return host_service.connect_service(
        location, launch(location, word), SCHEMA, SCHEMA, seconds=seconds, make_folder=True
    )


def wait_until(result) -> None:
    deadline = time.monotonic() + 30
    while not result():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_service_is_started_once_found_again_replaced_when_killed_and_gone_at_the_end(
    location: ServiceLocation,
) -> None:
    with connect(location, "0.3") as first, connect(location, "0.3") as two:
        assert (
            talking.read_peer_credentials(first.sock)[0]
            == talking.read_peer_credentials(two.sock)[0]
            == location.find_service_pid()
        )
        with open(location.folder / "file", "w+") as file:
            (location.folder / "file").unlink()
            first.send(Echo("a"), b"body", [file.fileno()])
            assert first.receive(max_body_bytes=10) == Echo("a")
            assert first.body == b"body"
            os.write(first.files[0], b"the same file")
            os.close(first.files[0])
            assert os.pread(file.fileno(), 99, 0) == b"the same file"
        before = talking.read_peer_credentials(first.sock)[0]
        os.kill(before, signal.SIGKILL)
        with pytest.raises(EOFError):
            two.receive()
    with connect(location, "0.3") as second:
        assert second.request(Echo("b")) == Echo("b")
        assert talking.read_peer_credentials(second.sock)[0] != before
    wait_until(lambda: not location.folder.exists())


def test_what_keeps_a_service_from_starting_is_told(location: ServiceLocation, many_files: None) -> None:
    with pytest.raises(ServiceFailed, match="no data") as failed:
        connect(location, "no data")
    assert failed.value.kind == "DataError"


def test_a_folder_of_any_length_holds_a_service(tmp_path: Path) -> None:
    """An AF_UNIX address has at most 107 bytes, and TMPDIR of a batch system may have more."""
    location = ServiceLocation(tmp_path / ("long-" * 30) / "echo", "echo")
    location.folder.parent.mkdir()
    with connect(location, "0.1") as first:
        assert first.request(Echo("a")) == Echo("a")
        assert location.find_service_pid() == talking.read_peer_credentials(first.sock)[0]
        os.kill(location.find_service_pid(), signal.SIGKILL)
        with pytest.raises(EOFError):
            first.receive()
    with connect(location, "0.1") as second:
        assert second.request(Echo("b")) == Echo("b")
    wait_until(lambda: not location.folder.exists())


def test_a_socket_that_cannot_be_made_is_told_at_once(location: ServiceLocation) -> None:
    location.socket_path.mkdir(parents=True)
    with pytest.raises(ServiceFailed, match=r"the echo service cannot start: .*echo\.sock"):
        connect(location)


def test_a_service_that_is_stopped_keeps_nobody_waiting_for_ever(location: ServiceLocation) -> None:
    connect(location).close()
    os.kill(location.find_service_pid(), signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"no service replies|another process"):
        connect(location, seconds=0.5)
    os.kill(location.find_service_pid(), signal.SIGCONT)
    with connect(location) as late:
        assert late.request(Echo("b")) == Echo("b")


def test_a_folder_that_is_gone_is_not_made_again_where_it_tells_what_to_serve(location: ServiceLocation) -> None:
    with pytest.raises(FileNotFoundError):
        host_service.connect_service(location, launch(location), SCHEMA, SCHEMA)


def test_a_process_of_another_user_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = socket.socketpair()
    assert talking.read_peer_credentials(first) == (os.getpid(), os.getuid())
    talking.check_peer(first)
    monkeypatch.setattr(talking, "read_peer_credentials", lambda sock: (1, os.getuid() + 1))
    with pytest.raises(ProtocolError, match="user"):
        talking.check_peer(first)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Return the address of a server over TCP that accepts clients with the token."""
    listener = socket.create_server(("127.0.0.1", 0))

    def meet(sock: socket.socket) -> Conversation:
        client = Conversation(sock, SCHEMA, SCHEMA)
        with client.time_limit(connection_server.AUTHENTICATION_TIMEOUT):
            client.authenticate(b"token", "echo", "server")
        return client

    server, ended = ConnectionServer(listener, meet, talk, max_unauthenticated=8), threading.Event()
    thread = threading.Thread(target=server.serve, args=(ended.is_set,))
    thread.start()
    yield listener.getsockname()
    ended.set()
    server.wake()
    thread.join()
    server.stop()


def friend(where: tuple[str, int], token: bytes = b"token") -> Conversation:
    client = Conversation(socket.create_connection(where), SCHEMA, SCHEMA)
    with client.time_limit(20.0):
        client.authenticate(token, "echo", "client")
    return client


def test_a_flood_of_silent_strangers_keeps_nobody_out(echo) -> None:
    before = friend(echo)
    assert before.request(Echo("first")) == Echo("first")  # the server has completed its side of the authentication
    silent = [socket.create_connection(echo) for _ in range(100)]
    with friend(echo) as client:
        assert client.request(Echo("here")) == Echo("here")
    assert before.request(Echo("still here")) == Echo("still here")
    silent[0].settimeout(20)
    greeted = silent[0].recv(1000)
    assert not greeted or not silent[0].recv(1000)  # the first to come is the first to go
    for sock in silent + [before]:
        sock.close()


def test_a_stranger_has_one_deadline_however_it_sends(echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_server, "AUTHENTICATION_TIMEOUT", 0.3)
    with socket.create_connection(echo) as slow:
        slow.settimeout(20)
        sent, began = 0, time.monotonic()
        with contextlib.suppress(OSError):
            for byte in make_greeting(bytes(32)) * 99:
                slow.send(bytes([byte]))
                sent += 1
                if select.select([slow], [], [], 0.05)[0] and not slow.recv(1 << 16):
                    break
        assert sent < 32, "a byte at a time, it should have been cut off"
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "first", [bytes(1 << 16), make_head(1 << 30) + bytes(1 << 16), HEAD.pack(b"MS", 3, 0, 32, 0) + bytes(1 << 16)]
)
def test_what_is_no_greeting_is_not_read_on(echo, first: bytes) -> None:
    with socket.create_connection(echo) as sock:
        sock.settimeout(20)
        with contextlib.suppress(OSError):
            sock.sendall(first + bytes(1 << 16))
            while sock.recv(1 << 16):
                pass
    with pytest.raises((ProtocolError, EOFError, OSError)):
        friend(echo, b"wrong")
    with friend(echo) as client:
        assert client.request(Echo("here")) == Echo("here")


def test_no_descriptor_left_is_survived(location: ServiceLocation) -> None:
    """The service may open 40 files; 200 connect and say nothing."""
    with connect(location) as before:
        pid = talking.read_peer_credentials(before.sock)[0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, 40))
        silent = []
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(str(location.socket_path))
            silent.append(sock)
        assert before.request(Echo("still here")) == Echo("still here")
        with connect(location) as late:
            assert talking.read_peer_credentials(late.sock)[0] == pid
            assert late.request(Echo("here")) == Echo("here")
        for sock in silent:
            sock.close()


def test_a_service_that_ends_without_a_word_is_started_a_few_times_only(tmp_path: Path) -> None:
    module, starts = tmp_path / "silent_service.py", tmp_path / "starts"
    module.write_text(f"open({str(starts)!r}, 'a').write('x')\n")
    location = ServiceLocation(tmp_path / "silent", "silent")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    launch = Launch("silent_service", [], environment={"PYTHONPATH": paths})
    with pytest.raises(TimeoutError, match="no service replies"):
        host_service.connect_service(location, launch, SCHEMA, SCHEMA, seconds=1.0, make_folder=True)
    assert 1 <= len(starts.read_text()) <= 6  # pauses of 0.02, 0.04, 0.08, ... seconds
