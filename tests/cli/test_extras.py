"""Training without the packages of extras. A feature that needs a package names the extra that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale import config, errors
from megascale.errors import EXIT_USAGE, ConfigError, describe_install, missing_extra
from megascale.observe.store.span_sinks import check_installed, open_span_sinks
from megascale.observe.store.spool import Segment
from megascale.rendezvous.stores import STORES, StoreRequest, open_store

ABSENT = ("matplotlib", "duckdb")


@pytest.fixture
def without_extras(tmp_path: Path):
    """Return a function that runs `megascale ARGUMENTS` in a new process that cannot import the packages of ABSENT."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megascale"] + [str(argument) for argument in arguments]
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def test_training_needs_no_extra(without_extras, tiny, tmp_path):
    done = without_extras("train", tiny, "--train.steps=2", "--train.name=core", "--observe.timers=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no loss curve: the package matplotlib is not installed" in done.stdout
    run = next(tmp_path.rglob("core/metrics.jsonl")).parent
    assert list(run.glob("spans/host=0/*.bin"))  # The frames wait for a process that has duckdb.
    for arguments, extra in ((("plot", run), "plots"), (("spans", run), "spans")):
        done = without_extras(*arguments)
        assert done.returncode == EXIT_USAGE, done.stderr
        assert f"[{extra}]" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_span_sink_without_its_package_keeps_the_segment(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    sink = open_span_sinks(["parquet"])(tmp_path)
    for number in (0, 0, 1):
        with pytest.raises(OSError, match=r"parquet: the package duckdb is not installed.*\[spans\]"):
            sink.write_segment(number, Segment({}, {}))
    assert len(caplog.records) == 1


def test_other_missing_modules_do_not_name_an_extra():
    assert missing_extra(ModuleNotFoundError("No module named 'numpy'", name="numpy")) is None
    assert missing_extra(ModuleNotFoundError("no name")) is None
    assert "[network]" in str(missing_extra(ModuleNotFoundError("", name="numba.core")))


def test_an_extra_of_a_checkout_has_the_tested_versions(tmp_path, monkeypatch):
    assert describe_install("cudnn").startswith("run pip install -c constraints.txt -e '.[cudnn]' in ")
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lib" / "megascale" / "errors.py"))
    assert describe_install("cudnn") == "run pip install 'megascale[cudnn]'"


@pytest.mark.parametrize(
    ("sink", "package"), [("kafka=h:9092", "confluent_kafka"), ("clickhouse=http://h:8123", "duckdb")]
)
def test_a_sink_without_its_extra_fails_before_the_first_step(monkeypatch, sink, package):
    name = sink.partition("=")[0]
    check_installed(["parquet", sink])
    monkeypatch.setitem(sys.modules, package, None)
    check_installed(["parquet"])
    with pytest.raises(ConfigError, match=rf"span_sinks={name} needs the package {package}.*\[{name}\]"):
        check_installed(["parquet", sink])


def test_redis_without_its_extra_names_it(monkeypatch):
    monkeypatch.delitem(STORES, "redis", raising=False)
    for name in [name for name in sys.modules if name.startswith("megascale.plugins.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hiredis", None)
    settings = config.load(None, ["--rendezvous.url=rediss://host:6379"]).rendezvous
    with pytest.raises(ConfigError, match=r"the package hiredis is not installed.*\[redis\]"):
        open_store(StoreRequest(settings, "run", rank=0, world=1, timeout=1.0))
