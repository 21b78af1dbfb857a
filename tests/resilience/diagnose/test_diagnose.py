"""Self-checks: a calm machine passes, a broken one is named, and what is absent says so."""

from __future__ import annotations

import json
import random
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.errors import ConfigError, DataError
from megascale.resilience.diagnose import compute, memory_check, nics
from megascale.resilience.diagnose.alltoall import run_all_to_all
from megascale.resilience.diagnose.check import MIN_RATES, Expected, SelfCheck, run_guarded
from megascale.resilience.diagnose.pairs import Inquiry, join_inquiry
from tests.forked import Forked, call_forked


def test_a_calm_machine_passes_and_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "GEMM_SECONDS", 0.01)
    file = tmp_path / "expected.json"
    arguments = [
        "diagnose",
        "--json",
        "--expected",
        str(file),
        "--check",
        "gemm",
        "--check",
        "model",
        "--check",
        "memory",
    ]
    results = [CliRunner().invoke(app, arguments) for _ in range(2)]
    assert [r.exit_code for r in results] == [0, 0]
    reports = [json.loads(r.stdout) for r in results]
    names = {c["name"]: c for c in reports[1]["checks"]}
    rate = next(c for name, c in names.items() if name.startswith("gemm rate"))
    assert rate["measured"] > 0
    assert rate["passed"]
    bits = [[c["digest"] for c in report["checks"] if c["digest"]] for report in reports]
    assert bits[0] == bits[1]
    assert len(bits[0]) >= 2
    kind = reports[0]["hardware"]
    assert all(len(rates) == 2 for rates in json.loads(file.read_text())["rates"][kind].values())


def test_hardware_that_is_not_there_is_absent_and_no_failure():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    result = list(memory_check.check_host_device()) + list(memory_check.check_device_pairs())
    assert {c.result for c in result} == {"absent"}
    assert all(c.has_passed and c.details for c in result)


def test_slow_or_different_machines_fail():
    expected = Expected("kind", "2.13")
    for _ in range(MIN_RATES):
        expected.learn(SelfCheck("gemm rate cuda:0", "passed", 100.0, "TFLOP/s"))
        expected.learn(SelfCheck("gemm bits cuda:0", "passed", digest="aa"))
    assert expected.judge(SelfCheck("gemm rate cuda:3", "passed", 95.0, "TFLOP/s")).has_passed
    slow = expected.judge(SelfCheck("gemm rate cuda:3", "passed", 70.0, "TFLOP/s"))
    assert (slow.result, slow.expected) == ("failed", 80.0)
    assert "70" in slow.details
    assert "100" in slow.details
    assert not expected.judge(SelfCheck("gemm bits cuda:0", "passed", digest="ab")).has_passed
    assert (
        Expected("kind", "2.14", expected.rates, expected.digests)
        .judge(SelfCheck("gemm bits cuda:0", "passed", digest="ab"))
        .has_passed
    )
    assert Expected("other", "2.13", expected.rates).judge(SelfCheck("gemm rate cuda:3", "passed", 1.0)).has_passed


def test_what_a_check_raises_is_a_failure():
    def broken():
        raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")
        yield

    (check,) = run_guarded("gemm", broken)
    assert not check.has_passed
    assert "uncorrectable" in check.details


def test_a_matrix_unit_that_errs_once_is_caught(monkeypatch):
    honest, calls = torch.mm, 0

    def flaky(*arguments, **options):
        nonlocal calls
        calls += 1
        result = honest(*arguments, **options)
        if calls == 4:
            result[3, 5] += 1e-3
        return result

    a = torch.randn(32, 32)
    assert compute._compare_gemm_bits(torch.device("cpu"), a, a).has_passed
    monkeypatch.setattr(torch, "mm", flaky)
    assert not compute._compare_gemm_bits(torch.device("cpu"), a, a).has_passed


def test_a_damaged_file_of_expectations_is_named(tmp_path):
    file = tmp_path / "expected.json"
    file.write_text("[1, 2")
    with pytest.raises(DataError, match=r"expected\.json"):
        Expected.load(file, "kind", "2.13")


def test_loopback_streams_count_their_bytes():
    result = [c for c in nics.check_streams() if c.name == "nic loopback lo"]
    assert [c.result for c in result] == ["passed"]
    assert result[0].measured > 0


def test_all_to_all_between_processes_checks_bits():
    check = call_forked(run_all_to_all, 2, "cpu", 1 << 20)
    assert check.result == "passed", check.details
    assert check.measured > 0


# regrouping ----------------------------------------------------------------------------------------------------------


def inquire(world: int, works) -> tuple[Inquiry, int]:
    inquiry, rounds = Inquiry(range(world)), 0
    while pairs := inquiry.choose_pairs():
        assert len({n for pair in pairs for n in pair}) == 2 * len(pairs), "a node is in two pairs of a round"
        assert not inquiry.tested_pairs & set(pairs), "a pair is tested twice"
        inquiry.record_results((pair, works(*pair)) for pair in pairs)
        rounds += 1
    return inquiry, rounds


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_regrouping_names_exactly_the_bad_nodes(data):
    world = data.draw(st.integers(4, 40))
    bad = data.draw(st.sets(st.integers(0, world - 1), max_size=max(0, world // 2 - 1)))
    if world - len(bad) < 3:
        return
    inquiry, rounds = inquire(world, lambda a, b: a not in bad and b not in bad)
    assert inquiry.bad_nodes == bad
    assert inquiry.good_nodes == set(range(world)) - bad
    assert not inquiry.suspects
    assert not inquiry.bad_links
    if len(bad) <= 1:
        assert rounds <= 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_bad_link_accuses_no_node(data):
    world = data.draw(st.integers(4, 40).map(lambda n: n // 2 * 2))
    first = 2 * data.draw(st.integers(0, world // 2 - 1))
    inquiry, _ = inquire(world, lambda a, b: (a, b) != (first, first + 1))
    assert inquiry.bad_nodes == set()
    assert inquiry.bad_links == [(first, first + 1)]


def test_two_nodes_that_fail_with_each_other_are_both_suspects():
    inquiry, _ = inquire(2, lambda a, b: False)
    assert inquiry.suspects == [0, 1]
    assert not inquiry.choose_pairs()
    assert not inquiry.bad_nodes


@pytest.mark.parametrize("how", ["slow", "silent", "busy at first"])
def test_nodes_find_the_bad_one_together(how):
    """Five nodes over a real store; node 3 is slow, or never says a word, or is busy with something else once."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    result = {}

    def measure(pair, node, number):
        return random.uniform(9, 11) * (0.2 if 3 in pair and (how == "slow" or number == 0) else 1.0)

    def node(number: int) -> None:
        local = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=30), wait_for_workers=False)
        result[number] = join_inquiry(local, number, 5, measure, seconds=1.0 if how == "silent" else 30.0)

    nodes = [threading.Thread(target=node, args=(n,)) for n in range(5) if how != "silent" or n != 3]
    for thread in nodes:
        thread.start()
    for thread in nodes:
        thread.join(60)
    assert len(result) == len(nodes)
    bad = () if how == "busy at first" else (3,)
    assert {f.bad_nodes for f in result.values()} == {bad}
    assert {f.bad_links for f in result.values()} == {()}
    assert result[0].to_self_check(0).has_passed
    assert result[0].to_self_check(3).has_passed == (not bad)


def test_three_real_nodes_all_reduce(tmp_path):
    from megascale.core.addresses import find_free_port

    port = find_free_port()
    command = ["diagnose", "--pairs", f"127.0.0.1:{port}", "--world", 3]
    nodes = [Forked(command + ["--node", n, "--json"], split=True) for n in range(3)]
    results = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], results
    assert all(json.loads(out)["checks"][0]["measured"] > 0 for out, _ in results)


def test_a_name_that_does_not_resolve_is_refused_at_once(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    result = CliRunner().invoke(app, ["diagnose", "--pairs", "n1:29700"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot resolve the name n1 (Name or service not known); write the IP address" in str(result.exception)
