"""The driver's API against strangers on real sockets: what they may send, hold and learn without a token."""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience.driver.api import access, http_limits
from megascale.resilience.driver.api.client import send_request
from megascale.resilience.driver.recovery.hot_update import check_settings, store_settings
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.contact import Contact, driver_folder, write_contact
from tests.resilience.driver.api.test_http_api import Served
from tests.resilience.driver.api.test_http_api import served as served

MIB = 1 << 20


def _connect(url: str) -> socket.socket:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _send_all(sock: socket.socket, head: bytes, body: int) -> tuple[int, bytes]:
    """Send a head, then up to `body` bytes as long as the other side takes them: (how many, what it answered)."""
    sock.sendall(head)
    sent = 0
    piece = b"[" * MIB
    try:
        while sent < body:
            sent += sock.send(piece[: body - sent])
    except OSError:
        pass
    return sent, _read(sock)


def _read(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    result = b""
    try:
        while data := sock.recv(1 << 16):
            result += data
    except ConnectionResetError:
        pass
    return result


def _head(method: str, path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}"] + list(lines) + ["", ""]).encode()


def _ask(served: Served, *lines: str, path: str = "/v1/job", method: str = "GET", host: str = "127.0.0.1") -> int:
    with _connect(served.url) as sock:
        sock.sendall(_head(method, path, *lines, "Content-Length: 0", host=host))
        return int(_read(sock).split(b" ")[1])


@pytest.mark.parametrize("length", ["Content-Length: 1073741824", "Transfer-Encoding: chunked"])
def test_no_body_is_read_without_a_token(served, length):
    first = b"40000000\r\n" if length.endswith("chunked") else b""
    with _connect(served.url) as sock:
        sent, answer = _send_all(sock, _head("POST", "/v1/job/restart", length) + first, 1 << 30)
    assert sent < 16 * MIB  # what the kernel holds for both ends
    assert answer == b"" or answer.startswith(b"HTTP/1.1 401")
    assert served.ask("/v1/job")[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_no_long_body_is_read_with_a_token(served, chunked):
    size = 256 * MIB
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    first = f"{size:x}\r\n".encode() if chunked else b""
    head = _head("POST", "/v1/job/restart", length, f"Authorization: Bearer {served.token}") + first
    began = time.monotonic()
    with _connect(served.url) as sock:
        sent, answer = _send_all(sock, head, size)
    assert sent < 16 * MIB
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    assert served.ask("/v1/job")[0] == 200
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("authorised", [False, True])
def test_what_is_no_http_fills_no_log(served, capfd, caplog, authorised):
    token = [f"Authorization: Bearer {served.token}"] if authorised else []
    for output in (
        _head("POST", "/v1/job/resume", "Transfer-Encoding: chunked", *token) + b"no chunk\r\n\r\n",
        _head("POST", "/v1/job/resume", "Transfer-Encoding: chunked", *token) + b"1\r\n{\r\n-1\r\n",
        _head("POST", "/v1/job/resume", "Content-Length: 5", *token) + b"{",
        _head("GET", "/v1/job", *token) + b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _head("GET", "/v1/job", "Upgrade: websocket", "Connection: Upgrade", *token),
        _head("GET", "http://[", *token),
        _head("GET", "/%ff%00", *token),
        _head("CONNECT", "evil.example:443", *token),
    ):
        with _connect(served.url) as sock:
            sock.sendall(output)
            sock.shutdown(socket.SHUT_WR)
            _read(sock)
    assert served.ask("/v1/job")[0] == 200
    assert capfd.readouterr().err == ""
    assert not [record for record in caplog.records if record.name != "httpx"]


def test_deep_json_is_refused(served):
    body = b"[" * 200_000
    head = _head(
        "POST", "/v1/job/resume", f"Authorization: Bearer {served.token}", f"Content-Length: {len(body)}",
        "Content-Type: application/json",
    )  # fmt: skip
    with _connect(served.url) as sock:
        sock.sendall(head + body)
        assert _read(sock).split(b" ")[1] in (b"400", b"422")
    assert served.ask("/v1/job")[0] == 200


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of a flood in one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine lets a process have too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_connections_take_few_descriptors_and_shut_nobody_out(many_files, served):
    silent = []
    before = len(os.listdir("/proc/self/fd"))
    try:
        for _ in range(1100):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", int(served.url.rpartition(":")[2])))
            silent.append(sock)
        assert served.ask("/v1/job")[0] == 200
        assert served.ask("/v1/nodes/n1/cordon", {"why": "in a flood"})[0] == 200
        assert [e["kind"] for e in served.ask("/v1/events")[1]] == ["node_cordoned"]
        assert len(os.listdir("/proc/self/fd")) < before + len(silent) + http_limits.CONNECTIONS + 16
    finally:
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("output", [b"", b"GET /v1/job HT", b"GET /v1/job HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_slow_head_is_not_waited_for(tmp_path, monkeypatch, output):
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 0.3)
    result = Served(tmp_path / "run")
    try:
        with _connect(result.url) as sock:
            began = time.monotonic()
            sock.sendall(output)
            assert _read(sock) == b""
            assert time.monotonic() - began < 10
    finally:
        result.over.set()
        result.thread.join(20)


def test_a_slow_body_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(http_limits, "REQUEST_SECONDS", 0.3)
    result = Served(tmp_path / "run")
    try:
        head = _head("POST", "/v1/job/resume", f"Authorization: Bearer {result.token}", "Content-Length: 50")
        with _connect(result.url) as sock:
            sock.sendall(head + b"{")
            assert _read(sock) == b""
    finally:
        result.over.set()
        result.thread.join(20)


def test_a_head_is_bounded(served):
    with _connect(served.url) as sock:
        sent, answer = _send_all(sock, b"GET / HTTP/1.1\r\nHost: a\r\nX: ", 64 * MIB)
    assert sent < 16 * MIB
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_one_token_looks_and_one_orders(served):
    read, act = f"Authorization: Bearer {served.read_token}", f"Authorization: Bearer {served.token}"
    agents = (served.run / "driver" / "token").read_text().strip()
    assert len({served.read_token, served.token, agents}) == 3
    for token, looks, orders in ((read, 200, 403), (act, 200, 422), (f"Authorization: Bearer {agents}", 401, 401)):
        assert _ask(served, token) == looks
        assert _ask(served, token, method="POST", path="/v1/job/resume") == orders
    for name in ("token", "token.read", "token.act"):
        assert (served.run / "driver" / name).stat().st_mode & 0o077 == 0
    peers = [p for p in served.run.rglob("*") if p.is_file() and not p.name.startswith("token")]
    assert peers
    for token in (served.read_token, served.token, agents):
        assert not any(token.encode() in p.read_bytes() for p in peers)


def test_nothing_is_told_without_a_token(served):
    for path in ("/openapi.json", "/docs", "/redoc", "/", "/v1/nothing", "/v1/job"):
        assert _ask(served, path=path) == 401, path


def test_pages_of_other_sites_are_turned_away(served):
    for host, origin, code in (
        ("127.0.0.1", None, 200),
        ("127.0.0.1:80", None, 200),
        ("[::1]:80", None, 200),
        ("localhost", None, 200),
        (socket.gethostname(), None, 200),
        ("evil.example", None, 400),
        ("127.0.0.1.evil.example", None, 400),
        ("", None, 400),
        ("localhost:80", "http://localhost:80", 200),
        ("localhost:80", "http://evil.example", 403),
        ("localhost:80", "https://localhost:80", 403),
        ("localhost:80", "null", 403),
    ):
        lines = [f"Authorization: Bearer {served.token}"] + ([f"Origin: {origin}"] if origin else [])
        assert _ask(served, *lines, host=host) == code, (host, origin)


def test_orders_change_numbers_and_listed_words_only():
    check_settings(["lr.peak=1e-3", "train.eval-interval=5", "lr.decay_shape=sqrt", "data.shuffle=false"])
    check_settings(["checkpoint.accept_changes=data.shuffle"])
    check_settings(["lr.paek=1"])  # The loader reports the error.
    config = load(None, [])
    for setting in (
        "data.train=/etc/passwd",
        "checkpoint.location=/tmp/elsewhere",
        "rendezvous.url=redis://evil.example:1",
        "resilience.log_patterns=(a+)+b",
        "resilience.nodes=3",
        "model.hidden=64",
        "train.runs=/tmp",
    ):
        section, _, key = setting.partition("=")[0].partition(".")
        assert hasattr(getattr(config, section), key), setting
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            check_settings([setting])


def test_other_settings_are_taken_from_the_run_folder_only(tmp_path):
    result = Served(tmp_path / "run", Phase.RUNNING)
    try:
        body = {"settings": ["data.train=/etc/passwd"]}
        assert "data.train" in result.ask("/v1/job/restart", body)[1]["detail"]
        code, answer = result.ask("/v1/job/restart", {"from_folder": True})
        assert (code, "no settings for a restart" in answer["detail"]) == (409, True)
        store_settings(result.run, ["data.paek=/data"])
        code, answer = result.ask("/v1/job/restart", {"from_folder": True})
        assert (code, "data.paek" in answer["detail"]) == (400, True)
        assert result.driver.job.phase is Phase.RUNNING
        assert not list(driver_folder(result.run).glob("restart.json"))
    finally:
        result.over.set()
        result.thread.join(20)


class _Elsewhere(Served):
    """Listens for other machines too."""

    host = "0.0.0.0"


def test_other_machines_are_spoken_to_over_tls(tmp_path, capsys):
    pytest.importorskip("cryptography")
    result = _Elsewhere(tmp_path / "run")
    try:
        assert result.url.startswith("https://0.0.0.0:")
        write_contact(result.run, Contact("job", 1, 1, ("", 0), result.url))
        assert send_request(result.run, "GET", "/v1/job")["phase"] == "paused"
        with _connect(result.url) as sock:  # Without it a client learns nothing.
            sock.sendall(_head("GET", "/v1/job", f"Authorization: Bearer {result.token}"))
            assert b"HTTP" not in _read(sock)
        # Another that has taken the address is not told the token.
        (driver_folder(result.run) / access.CERTIFICATE).write_bytes(access._create_certificate("0.0.0.0")[0])
        with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            send_request(result.run, "GET", "/v1/job")
    finally:
        result.over.set()
        result.thread.join(20)


def test_the_clusters_own_certificate_is_used(tmp_path):
    pytest.importorskip("cryptography")
    certificate, key = access._create_certificate("127.0.0.1")
    (tmp_path / "a.crt").write_bytes(certificate)
    (tmp_path / "a.key").write_bytes(key)
    driver_folder(tmp_path).mkdir()
    pair = (str(tmp_path / "a.crt"), str(tmp_path / "a.key"))
    assert isinstance(access.create_server_context(tmp_path, "127.0.0.1", *pair), ssl.SSLContext)
    assert (driver_folder(tmp_path) / access.CERTIFICATE).read_bytes() == certificate
    with pytest.raises(ConfigError, match="tls_key"):
        access.create_server_context(tmp_path, "127.0.0.1", pair[0], str(tmp_path / "none.key"))
    with pytest.raises(ConfigError, match="belong together"):
        load(None, ["--resilience.tls_key=a.key"])


def test_without_a_certificate_other_machines_are_refused(tmp_path, monkeypatch):
    driver_folder(tmp_path).mkdir()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="cryptography"):
        access.create_server_context(tmp_path, "0.0.0.0", None, None)
    assert access.create_server_context(tmp_path, "127.0.0.1", None, None) is None


def test_no_token_goes_over_a_network_in_clear(tmp_path):
    driver_folder(tmp_path).mkdir()
    for name in ("token.read", "token.act"):
        (driver_folder(tmp_path) / name).touch(0o600)
        (driver_folder(tmp_path) / name).write_text("x" * 64)
    write_contact(tmp_path, Contact("job", 1, 1, ("", 0), "http://192.0.2.1:80"))
    with pytest.raises(ConfigError, match="without TLS"):
        send_request(tmp_path, "GET", "/v1/job")


def test_whoever_has_taken_the_drivers_port_is_told_no_token(tmp_path):
    if os.geteuid():
        pytest.skip("only root can listen as another user")
    driver_folder(tmp_path).mkdir()
    for name in ("token.read", "token.act"):
        (driver_folder(tmp_path) / name).touch(0o600)
        (driver_folder(tmp_path) / name).write_text("x" * 64)
    os.seteuid(65534)
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with listener:
        port = listener.getsockname()[1]
        write_contact(tmp_path, Contact("job", 1, 1, ("", 0), f"http://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match="another user"):
            send_request(tmp_path, "POST", "/v1/job/resume", {})


def test_an_answer_of_the_guard_is_json(served):
    with _connect(served.url) as sock:
        sock.sendall(_head("GET", "/v1/job"))
        head, _, body = _read(sock).partition(b"\r\n\r\n")
    assert b"www-authenticate: Bearer" in head
    assert "token.read" in json.loads(body)["detail"]
