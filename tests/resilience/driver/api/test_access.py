"""A run looked at and steered from a machine that does not see its folder: one private file leads to the driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("cryptography")

from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.resilience.driver.api.access import LOG_PIECE, create_access, read_log_piece
from megascale.resilience.driver.api.client import send_request
from megascale.resilience.protocol.contact import Contact, write_contact
from tests.resilience.driver.api.test_http_api import Served


class Open(Served):
    """A driver that other machines reach."""

    host = "0.0.0.0"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    run = tmp_path_factory.mktemp("runs") / "job"
    present = Open(run)
    write_contact(run, Contact("job", 1, 1, ("0.0.0.0", 1), present.url))
    (run / "logs").mkdir()
    (run / "logs" / "rank-3.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    yield present
    present.over.set()
    present.thread.join()


def private(file: Path, text: str) -> Path:
    file.touch(0o600)
    file.write_text(text)
    return file


@pytest.fixture
def look(served, tmp_path) -> Path:
    """A file with which one may look, on a machine whose name for the driver is an address."""
    report = json.loads(create_access(served.run, for_orders=False, host="192.0.2.1").to_text())
    report["api"] = f"https://127.0.0.1:{report['api'].rpartition(':')[2]}"
    return private(tmp_path / "look.access", json.dumps(report))


def run(*arguments: object):
    return CliRunner().invoke(app, [str(word) for word in arguments])


def test_nodes_events_and_logs_come_without_the_run_folder(served, look):
    shown = run("nodes", look)
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:3]] == ["n0", "n1"]
    served.loop.call_soon_threadsafe(lambda: served.driver.record_event("paused", evidence=("for a test",)))
    report = run("events", look)
    assert report.exit_code == 0, report.output
    logs = run("logs", look, "--rank=3", "--lines=2")
    assert logs.stdout == "line 19998\nline 19999\n"
    assert run("logs", served.run, "--rank=3", "--lines=2").stdout == logs.stdout


def test_who_may_look_may_not_steer(served, look, tmp_path):
    with pytest.raises(ConfigError, match="refused"):
        send_request(look, "POST", "/v1/nodes/n1/cordon", {"why": "test"})
    report = json.loads(look.read_text()) | {
        "token": json.loads(create_access(served.run, for_orders=True, host="192.0.2.1").to_text())["token"]
    }
    act = private(tmp_path / "act.access", json.dumps(report))
    assert run("cordon", act, "n1").stdout.startswith("done")
    assert served.driver.nodes["n1"].record.cordoned


def test_another_certificate_is_told_no_token(look, served, tmp_path):
    from megascale.resilience.driver.api.access import _create_certificate

    report = json.loads(look.read_text())
    report["certificate"] = _create_certificate("x")[0].decode()
    with pytest.raises(TrainingError, match="certificate verify failed"):
        send_request(private(tmp_path / "other.access", json.dumps(report)), "GET", "/v1/nodes")


def test_a_file_that_others_read_or_that_is_something_else_is_refused(look, tmp_path):
    look.chmod(0o640)
    with pytest.raises(DataError, match="can be read by others; run `chmod 600"):
        send_request(look, "GET", "/v1/nodes")
    typed, clear = '{"job": 1, "api": "https://h:1", "token": "t"}', '{"job": "j", "api": "http://h:1", "token": "t"}'
    for text in ("", "{}", "[]", typed, clear):
        with pytest.raises(DataError, match="megascale access"):
            send_request(private(tmp_path / "odd", text), "GET", "/v1/nodes")


def test_a_driver_on_loopback_gives_no_access_to_others(served, tmp_path):
    with pytest.raises(ConfigError, match=r"only its own machine reaches: launch with --resilience\.listen"):
        create_access(served.run, for_orders=False, host="127.0.0.1")


def test_pieces_of_a_log(tmp_path):
    file = tmp_path / "log"
    assert read_log_piece(file, 0) is None
    file.write_bytes(b"0123456789")
    assert read_log_piece(file, -4) == (6, b"6789")
    assert read_log_piece(file, -LOG_PIECE) == (0, b"0123456789")
    assert read_log_piece(file, 4) == (4, b"456789")
    assert read_log_piece(file, 10) == (10, b"")
    assert read_log_piece(file, 11) == (0, b"0123456789")  # begun anew
