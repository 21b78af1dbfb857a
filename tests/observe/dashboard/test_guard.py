"""Requests that the dashboard accepts, and the rights of a browser on its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megascale.errors import ConfigError
from megascale.observe.dashboard.guard import POLICY, Guard
from megascale.observe.dashboard.query_process import QueryProcess
from megascale.observe.dashboard.questions import Sources
from megascale.observe.dashboard.serve import (
    ServerOptions,
    _announce,
    _open_in_browser,
    _open_reading_token,
    list_host_names,
    make_tls_context,
)
from tests.forked import Forked

TOKEN = b"r" * 64


async def inside(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


def ask(guard: Guard, method: str = "GET", path: str = "/api/runs", **headers: str) -> tuple[int, dict[bytes, bytes]]:
    inputs = {"host": "127.0.0.1:8265"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http", "method": method, "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in inputs.items()],
    }  # fmt: skip
    output: list[dict] = []

    async def send(message):
        output.append(message)

    async def run():
        await guard(scope, None, send)

    asyncio.run(run())
    return output[0]["status"], dict(output[0]["headers"])


@pytest.fixture
def guard() -> Guard:
    return Guard(inside, list_host_names("127.0.0.1"), "http", None)


def test_every_answer_carries_the_policy(guard):
    for match in (ask(guard), ask(guard, host="evil.example")):
        assert match[1][b"content-security-policy"] == POLICY.encode()
        assert match[1][b"x-content-type-options"] == b"nosniff"
    assert "unsafe" not in POLICY
    assert "*" not in POLICY
    assert "http" not in POLICY


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8265", "", "10.0.0.1:8265", "[::2]:1", "localhost."]
)
def test_other_names_are_refused(guard, host):
    assert ask(guard, host=host)[0] == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8265", "localhost:1", "LOCALHOST", "[::1]:8265"])
def test_own_names_are_taken(guard, host):
    assert ask(guard, host=host)[0] == 200


def test_other_sites_are_refused(guard):
    assert ask(guard, origin="http://127.0.0.1:8265")[0] == 200
    for origin in ("http://evil.example", "null", "https://127.0.0.1:8265", "http://127.0.0.1:9999"):
        assert ask(guard, origin=origin)[0] == 403, origin
    assert ask(guard, sec_fetch_site="cross-site")[0] == 403
    assert ask(guard, path="/", sec_fetch_site="cross-site")[0] == 200  # a link from elsewhere leads here


def test_orders_come_from_the_page_as_json_of_known_length(guard):
    good = {"origin": "http://127.0.0.1:8265", "content_type": "application/json", "content_length": "40"}
    assert ask(guard, "POST", **good)[0] == 200
    assert ask(guard, "POST", **{k: v for k, v in good.items() if k != "origin"})[0] == 403
    assert ask(guard, "POST", **good | {"content_type": "text/plain"})[0] == 415
    assert ask(guard, "POST", **good | {"content_length": str(1 << 20)})[0] == 413
    assert ask(guard, "POST", **{k: v for k, v in good.items() if k != "content_length"})[0] == 413


def test_reading_over_a_network_needs_the_token():
    guard = Guard(inside, list_host_names("127.0.0.1"), "http", TOKEN)
    assert ask(guard)[0] == 401
    assert ask(guard, authorization="Bearer " + "x" * 64)[0] == 401
    assert ask(guard, authorization=TOKEN.decode())[0] == 401
    assert ask(guard, authorization=f"bearer {TOKEN.decode()}")[0] == 200
    assert ask(guard, path="/pages/main.js")[0] == 200  # the page that asks for the token tells nothing


def test_listening_beyond_this_machine_needs_token_and_tls(tmp_path: Path):
    for at in (
        ServerOptions("0.0.0.0"),
        ServerOptions("0.0.0.0", token_file=tmp_path / "t"),
        ServerOptions("0.0.0.0", token_file=tmp_path / "t", certificate=tmp_path / "c"),
        ServerOptions("0.0.0.0", no_token=True, certificate=tmp_path / "c", key=tmp_path / "k"),
        ServerOptions("127.0.0.1", key=tmp_path / "k"),
        ServerOptions("127.0.0.1", certificate=tmp_path / "c", key=tmp_path / "k"),
    ):
        with pytest.raises(ConfigError, match=r"--(host|certificate)"):
            make_tls_context(at)
    with pytest.raises(ConfigError, match="exclude each other"):
        make_tls_context(ServerOptions(token_file=tmp_path / "t", no_token=True))
    assert make_tls_context(ServerOptions()) is None


def get(url: str, **headers: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_command_keeps_its_token_and_its_folder(serve, runs, tmp_path):
    token = tmp_path / "token"
    address = serve(runs / "calm", "--token-file", str(token))
    assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
    assert get(f"{address}api/runs")[0] == 401
    shown = {"Authorization": f"Bearer {token.read_text()}"}
    assert get(f"{address}api/runs", **shown)[1]["runs"] == ["calm"]
    for requested in ("../other", "other", "%2e%2e%2fother", "calm%00"):
        status, report = get(f"{address}api/overview?run={requested}", **shown)
        assert (status, "there is no run" in report["detail"]) == (404, True), requested
    for requested in ("timeline?run=calm&view=up", "heat?run=calm&figure=x", "series?run=calm&key=loss&x=loss"):
        assert get(f"{address}api/{requested}", **shown)[0] == 400, requested
    assert get(f"{address}api/heat?run=calm&first=-1", **shown)[0] == 422


@pytest.mark.parametrize("half", [b"", b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_half_sent_heads_shut_nobody_out(address, half):
    port = int(address.rstrip("/").rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            sock.sendall(half)
        assert get(f"{address}api/runs")[0] == 200
        with urllib.request.urlopen(address, timeout=30) as page:
            assert page.status == 200


def test_without_a_token_the_risk_is_printed(tmp_path):
    lines: list[str] = []
    _announce(tmp_path, "http://127.0.0.1:1/", None, lines.append)
    assert "every user of this machine can read these runs" in " ".join(lines)


def test_a_browser_is_started_without_the_token_among_its_words(tmp_path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with _open_reading_token(ServerOptions(), "http://127.0.0.1:1/", 1) as access:
        _open_in_browser("http://127.0.0.1:1/", access)
        page = Path(opened[0].removeprefix("file://"))
        assert access.token.decode() not in opened[0]
        assert f"url={access.link}" in page.read_text()
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert not page.exists()
    assert not access.file.exists()


def test_wrong_words_on_the_command_line(megascale, runs, tmp_path):
    for arguments, code, output in (
        (["dashboard", tmp_path / "none"], 4, "is not a folder"),
        (["dashboard", runs, "--host", "0.0.0.0"], 2, "--token-file"),
        (["dashboard", runs, "--host", "0.0.0.0", "--no-token"], 2, "without a token"),
    ):
        done = megascale(*arguments)
        assert done.returncode == code
        assert output in done.stderr


def test_a_server_that_is_killed_leaves_nobody_behind(runs, tmp_path):
    """Its query processes end with it; Ctrl-C ends it with exit code 130."""
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        arguments = ["dashboard", runs, "--port=0", "--no-browser"]
        process = Forked(arguments, output=tmp_path / "out", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
        wait_until(lambda: "press Ctrl-C to end" in (tmp_path / "out").read_text())  # the last line
        wait_until(lambda process=process: len(children(process.pid)) >= 2)
        workers = children(process.pid)
        address = re.search(r"https?://\S+", (tmp_path / "out").read_text())[0]
        file = Path(re.search(r"the token in (\S+)", (tmp_path / "out").read_text())[1])
        assert get(f"{address}api/runs")[0] == 401
        assert file.read_text() not in (tmp_path / "out").read_text()  # a log may be read by others
        assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
        shown = {"Authorization": f"Bearer {file.read_text()}"}
        request = urllib.request.Request(f"{address}api/live?run=calm", headers=shown)
        stream = urllib.request.urlopen(request, timeout=30)  # open to the end
        assert stream.readline() == b": open\n"
        process.send_signal(number)
        assert process.wait(30) == code
        assert "Traceback" not in (tmp_path / "out").read_text()
        assert file.exists() == (number == signal.SIGKILL)
        stream.close()
        wait_until(lambda workers=workers: not any(Path(f"/proc/{pid}/stat").exists() for pid in workers))
        (tmp_path / "out").write_text("")


def test_a_query_process_never_receives_an_interruption():
    """A Ctrl-C while the process imports would print a traceback. It blocks the signal until it ignores it."""
    process = QueryProcess(Sources(dict, dict, dict))
    try:
        [pid] = process.pids
        status = Path(f"/proc/{pid}/status").read_text()
        masks = [int(value, 16) for value in re.findall(r"^Sig(?:Blk|Ign):\s*(\w+)$", status, re.MULTILINE)]
        assert any(mask >> (signal.SIGINT - 1) & 1 for mask in masks)
    finally:
        process.close()


def test_a_query_process_that_is_ended_leaves_no_thread():
    """One that still tidied up while the interpreter ends would print a traceback after Ctrl-C."""
    before = set(threading.enumerate())
    process = QueryProcess(Sources(dict, dict, dict))
    wait_until(lambda: process.pids)
    process.close()
    assert set(threading.enumerate()) <= before


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(present) -> None:
    deadline = time.monotonic() + 60
    while not present():
        assert time.monotonic() < deadline
        time.sleep(0.02)
