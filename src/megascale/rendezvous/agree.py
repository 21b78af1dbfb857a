"""The one meeting of all ranks at a start: every rank has come, and all mean the same job.

It costs each rank two small store calls whatever the size of the world, and rank 0 one read of all greetings.
A rank that is missing, comes twice, or has another world size or other settings is named on every rank that came.
Works on any torch Store.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, Store

from megascale.errors import ConfigError, TrainingError
from megascale.rendezvous.stores import StoreFault, Superseded

T = TypeVar("T")
VERDICT = "start/verdict"
_FAIL = "fail:"
_ALARM = "!"
_EXPLAIN = "explain:"
_SUPERSEDED = "superseded:"
# Ranks wait longer for rank 0's verdict than rank 0 waits for them, so that the verdict reaches them.
_GRACE_SECONDS = 5.0
_READERS_SECONDS = 10.0
_MAX_EXPLAINED = 4  # differing ranks that publish their settings


def hash_facts(facts: Mapping[str, str]) -> str:
    """Return a short fingerprint of settings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def agree(
    store: Store,
    rank: int,
    world: int,
    facts: Mapping[str, str],
    timeout: float,
    configured_timeout: float | None = None,
    *,
    restarts: bool = False,
) -> None:
    """Return once `world` ranks with equal `facts` have come; otherwise raise the same error on every rank that came.

    Args:
        store: shared by the job, used under the prefix `start/`.
        facts: settings by key and versions, as text, that must be equal on all ranks. No secrets.
        timeout: seconds to wait for the last rank.
        configured_timeout: `rendezvous.timeout`, of which `timeout` is the remaining part; errors name it.
        restarts: processes are restarted on this store, so a greeting may come from a process that has ended.

    Raises:
        ConfigError: another world size, a rank twice, different settings or versions; names ranks and key.
        TrainingError: ranks that did not come within `timeout`; names them.
        Superseded: a later rank 0 began another start on the same store; this rank must join that start.
    """
    deadline = time.monotonic() + timeout
    if configured_timeout is None:
        configured_timeout = timeout
    facts = {"WORLD_SIZE": str(world), **facts}
    greeting = f"{hash_facts(facts)} {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
    if not 0 <= rank < world:
        _raise_alarm(store, rank + 1, f"rank {rank} is outside a world of {world}; ranks count from 0 to {world - 1}")
    claimed = _claim_rank(store, rank, greeting, restarts)
    if claimed not in (greeting, _ALARM):
        _, host, pid, _ = claimed.split()
        if restarts and host != socket.gethostname():
            # The other process may have ended with its node: then rank 0 was restarted too, and supersedes this start.
            _raise_if_superseded(_read(store, VERDICT, deadline + _GRACE_SECONDS), rank)
        _raise_alarm(
            store,
            world,
            f"two processes claim rank {rank}: process {pid} on {host} and process {os.getpid()} on "
            f"{socket.gethostname()}; give each process its own RANK",
        )
    if rank == 0 and claimed != _ALARM:
        _publish_verdict(store, world, deadline, configured_timeout)
    verdict = _read(store, VERDICT, deadline + _GRACE_SECONDS)
    if verdict is None:
        raise _missing_ranks_error(world, _present_ranks(store, world), configured_timeout)
    _raise_if_superseded(verdict, rank)
    if verdict.startswith(_EXPLAIN):
        verdict = _explain_difference(store, rank, world, facts, json.loads(verdict.removeprefix(_EXPLAIN)), deadline)
    if verdict != "ok":
        kind, _, message = verdict.removeprefix(_FAIL).partition(":")
        if kind == "missing":
            raise TrainingError(message)
        raise ConfigError(message)


def _explain_difference(
    store: Store, rank: int, world: int, facts: Mapping[str, str], speakers: list[int], deadline: float
) -> str:
    """Publish the facts of this rank if it is one of `speakers`, and return rank 0's comparison of all of them."""
    if rank in speakers:
        store.set(f"start/facts/{rank}", json.dumps(dict(facts)))
    if rank == 0:
        store.set("start/final", _FAIL + _difference(store, world, speakers, deadline + _GRACE_SECONDS))
    verdict = _read(store, "start/final", deadline + 3 * _GRACE_SECONDS)
    if verdict is None:
        raise ConfigError(
            f"ranks {format_ranks(speakers)} were started with different settings; give every rank the same "
            "configuration and overrides"
        )
    return verdict


def wait_for_readers(store: Store, rank: int, world: int) -> None:
    """Let rank 0, which may serve the store, wait after a failed start until the other ranks have read the reason.

    Otherwise a rank that comes a little later would find no store and wait until its time-out.
    """
    store.set(f"start/told/{rank}", "1")
    if rank == 0:
        # An alarm has filled all greetings, also of ranks that have yet to come; absent ranks are not waited for.
        expected = [f"start/told/{r}" for r in range(1, world) if store.check([f"start/hello/{r}"])]
        with suppress(DistError):
            store.wait(expected, timedelta(seconds=_READERS_SECONDS))


def supersede(store: Store, world: int, successor: str) -> None:
    """End a start that has no verdict, so that its ranks join the start of `successor`, another rank 0."""
    verdict = _SUPERSEDED + successor
    if store.compare_set(VERDICT, "", verdict).decode() == verdict:
        _fill_greetings(store, world)


def _raise_if_superseded(verdict: str | None, rank: int) -> None:
    """Raise Superseded, or ConfigError on rank 0, if `verdict` says that another rank 0 began a later start."""
    if verdict is None or not verdict.startswith(_SUPERSEDED):
        return
    successor = verdict.removeprefix(_SUPERSEDED)
    if rank == 0:
        raise ConfigError(
            f"two processes claim rank 0: process {os.getpid()} on {socket.gethostname()} and {successor}, which "
            "came later; give each process its own RANK"
        )
    raise Superseded(f"{successor} began a later start as rank 0")


def _claim_rank(store: Store, rank: int, greeting: str, restarts: bool) -> str:
    """Write this process's greeting as `rank` unless another process has; return the greeting in the store.

    With `restarts`, the greeting of a process of this host that has ended is replaced.
    """
    key = f"start/hello/{rank}"
    claimed = store.compare_set(key, "", greeting).decode()
    if restarts and claimed not in (greeting, _ALARM):
        _, host, pid, _ = claimed.split()
        if host == socket.gethostname() and not _is_running(int(pid)):
            claimed = store.compare_set(key, claimed, greeting).decode()
    return claimed


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _publish_verdict(store: Store, world: int, deadline: float, configured_timeout: float) -> None:
    """Wait on rank 0 for all greetings, compare them, and publish the verdict."""
    keys = [f"start/hello/{rank}" for rank in range(world)]
    present = list(range(world))
    try:
        values = _read_before(store, deadline, lambda: store.multi_get(keys))
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        present = _present_ranks(store, world)
        values = store.multi_get([keys[rank] for rank in present])
        if len({value.split()[0] for value in values}) == 1 and len(present) < world:
            missing = _missing_ranks_error(world, present, configured_timeout)
            store.compare_set(VERDICT, "", f"{_FAIL}missing:{missing}")
            return
    greetings = [value.decode() for value in values]
    if _ALARM in greetings:
        return  # the rank that raised the alarm publishes the verdict
    first_ranks: dict[str, int] = {}
    for rank, greeting in zip(present, greetings, strict=True):
        first_ranks.setdefault(greeting.split()[0], rank)
    if len(first_ranks) == 1:
        store.compare_set(VERDICT, "", "ok")
        return
    # This also applies where ranks are missing: different settings, such as another WORLD_SIZE, may be the reason.
    store.compare_set(VERDICT, "", _EXPLAIN + json.dumps(list(first_ranks.values())[:_MAX_EXPLAINED]))


def _difference(store: Store, world: int, speakers: list[int], deadline: float) -> str:
    """Describe which ranks differ from the most common settings, and in which key first."""
    published: dict[int, dict[str, str]] = {}
    for speaker in speakers:
        text = _read(store, f"start/facts/{speaker}", deadline)
        if text is not None:
            published[speaker] = json.loads(text)
    if len(published) < 2:
        return f"config:ranks {format_ranks(speakers)} were started with different settings; start all of them alike"
    present = _present_ranks(store, world)
    greetings = store.multi_get([f"start/hello/{rank}" for rank in present])
    hashes = {rank: greeting.decode().split()[0] for rank, greeting in zip(present, greetings, strict=True)}
    groups = {speaker: [rank for rank in present if hashes[rank] == hashes[speaker]] for speaker in published}
    common = max(published, key=lambda speaker: (len(groups[speaker]), -speaker))
    differences = []
    for speaker in sorted(published.keys() - {common}):
        # The first speaker's order of keys has versions first, then settings in the order of the configuration.
        for key in published[common] | published[speaker]:
            value = published[speaker].get(key, "not set")
            common_value = published[common].get(key, "not set")
            if value != common_value:
                differing = _name_ranks(groups[speaker])
                differences.append(
                    f"{key} is {value} on {differing} but {common_value} on {_name_ranks(groups[common])}"
                )
                break
    return (
        f"config:the ranks were not started alike: {'; '.join(differences)}; give every rank the same configuration "
        "file, overrides and installed versions"
    )


def _present_ranks(store: Store, world: int) -> list[int]:
    return [rank for rank in range(world) if store.check([f"start/hello/{rank}"])]


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_ranks(ranks)}"


def _raise_alarm(store: Store, count: int, message: str) -> None:
    """Publish a failure at once, and raise it."""
    store.compare_set(VERDICT, "", f"{_FAIL}config:{message}")
    _fill_greetings(store, count)
    raise ConfigError(message)


def _fill_greetings(store: Store, count: int) -> None:
    """Fill the empty greetings of ranks below `count`, so that rank 0, which waits for them, wakes."""
    for rank in range(count):
        store.compare_set(f"start/hello/{rank}", "", _ALARM)


def _read(store: Store, key: str, deadline: float) -> str | None:
    """Return the value of `key`, or None if it does not come before `deadline`."""
    try:
        return _read_before(store, deadline, lambda: store.get(key)).decode()
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        if not store.check([key]):
            return None
        return store.get(key).decode()


def _read_before(store: Store, deadline: float, read: Callable[[], T]) -> T:
    """Run a waiting read with the store's time-out set to the time before `deadline`."""
    timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(0.01, deadline - time.monotonic())))
    try:
        return read()
    finally:
        store.set_timeout(timeout)


def _missing_ranks_error(world: int, present: list[int], configured_timeout: float) -> TrainingError:
    absent = sorted(set(range(world)) - set(present)) or [0]  # all have come, but rank 0 published no verdict
    subject, owner = ("ranks", "their") if len(absent) > 1 else ("rank", "its")
    return TrainingError(
        f"{subject} {format_ranks(absent)} of {world} did not come within rendezvous.timeout={configured_timeout:g} "
        f"seconds ({len(present)} did); look at {owner} log and host, or raise --rendezvous.timeout"
    )


def format_ranks(ranks: Iterable[int], limit: int = 12) -> str:
    """Return ranks as ranges, such as `0-3, 7`; a list of more than `limit` ranges is cut."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    text = ", ".join(texts[:limit])
    if len(texts) > limit:
        text += f" and {len(texts) - limit} more ranges"
    return text
