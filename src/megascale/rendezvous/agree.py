"""The one global meeting of a start: everybody is here, and everybody means the same job.

It costs each rank two small store calls whatever the size of the world, and rank 0 one read of all greetings.
A rank that is missing, comes twice, has another world size or other settings is named on every rank that did come.
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
from megascale.rendezvous.store_errors import StoreFault, Superseded

T = TypeVar("T")
VERDICT = "start/verdict"
_FAIL = "fail:"
_ALARM = "!"
_SUPERSEDED = "superseded:"
# Ranks wait a little longer for rank 0's verdict than rank 0 waits for them, so that the verdict reaches them.
_GRACE = 5.0
_SEE_OFF = 10.0
_EXPLAINED = 4  # at most so many differing ranks tell their settings


def hash_facts(facts: Mapping[str, str]) -> str:
    """A short fingerprint of settings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def agree(
    store: Store,
    rank: int,
    world: int,
    facts: Mapping[str, str],
    timeout: float,
    named: float | None = None,
    *,
    restarts: bool = False,
) -> None:
    """Return once `world` ranks with equal `facts` have come; else raise the same error on every rank that came.

    Args:
        store: shared by the job, used under the prefix `start/`.
        facts: what must be equal everywhere, as text: settings by key, versions. No secrets.
        timeout: seconds to wait for the last rank.
        named: the setting of which `timeout` is what is left, as errors name it.
        restarts: whether processes are restarted on this store, so that a greeting may be of a process that is gone.

    Raises:
        ConfigError: another world size, a rank twice, different settings or versions; names ranks and key.
        TrainingError: ranks that did not come within `timeout`; names them.
        Superseded: a later rank 0 began another start on the same store; this rank is to join that one.
    """
    deadline = time.monotonic() + timeout
    named = timeout if named is None else named
    facts = {"WORLD_SIZE": str(world), **facts}
    mark = hash_facts(facts)
    hello = f"{mark} {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
    if not 0 <= rank < world:
        _alarm(store, rank + 1, f"rank {rank} is outside a world of {world}; ranks count from 0 to {world - 1}")
    before = _claim(store, rank, hello, restarts)
    if before not in (hello, _ALARM):
        _, host, pid, _ = before.split()
        if restarts and host != socket.gethostname():
            # The other process may have ended with its node: then rank 0 was restarted too, and supersedes this start.
            _refuse_superseded(_await(store, VERDICT, deadline + _GRACE), rank)
        _alarm(
            store,
            world,
            f"two processes claim rank {rank}: process {pid} on {host} and process {os.getpid()} on "
            f"{socket.gethostname()}; give each process its own RANK",
        )
    if rank == 0 and before != _ALARM:
        _judge(store, world, deadline, named)
    verdict = _await(store, VERDICT, deadline + _GRACE)
    if verdict is None:
        raise _missing(world, _came(store, world), named)
    _refuse_superseded(verdict, rank)
    if verdict.startswith("explain:"):
        speakers = json.loads(verdict.removeprefix("explain:"))
        if rank in speakers:
            store.set(f"start/facts/{rank}", json.dumps(dict(facts)))
        if rank == 0:
            store.set("start/final", _FAIL + _difference(store, world, speakers, deadline + _GRACE))
        verdict = _await(store, "start/final", deadline + 3 * _GRACE)
        if verdict is None:
            raise ConfigError(
                f"ranks {ranges(speakers)} were started with different settings; give every rank the same "
                "configuration and overrides"
            )
    if verdict != "ok":
        kind, _, message = verdict.removeprefix(_FAIL).partition(":")
        raise TrainingError(message) if kind == "missing" else ConfigError(message)


def see_off(store: Store, rank: int, world: int) -> None:
    """After a start that failed: rank 0, who may serve the store, stays until the others have read why.

    Without this a rank that comes a little later finds nobody and waits out its whole time.
    """
    store.set(f"start/told/{rank}", "1")
    if rank == 0:
        # An alarm has filled all places, also of ranks that are still on their way; absent ranks are not waited for.
        expected = [f"start/told/{r}" for r in range(1, world) if store.check([f"start/hello/{r}"])]
        with suppress(DistError):
            store.wait(expected, timedelta(seconds=_SEE_OFF))


def supersede(store: Store, world: int, successor: str) -> None:
    """End a start that has no verdict yet, so that its ranks join the start of `successor`, another rank 0."""
    verdict = _SUPERSEDED + successor
    if store.compare_set(VERDICT, "", verdict).decode() == verdict:
        _fill_places(store, world)


def _refuse_superseded(verdict: str | None, rank: int) -> None:
    """Raise Superseded, or on rank 0 ConfigError, if `verdict` says that another rank 0 began a later start."""
    if verdict is None or not verdict.startswith(_SUPERSEDED):
        return
    successor = verdict.removeprefix(_SUPERSEDED)
    if rank == 0:
        raise ConfigError(
            f"two processes claim rank 0: process {os.getpid()} on {socket.gethostname()} and {successor}, which "
            "came later; give each process its own RANK"
        )
    raise Superseded(f"{successor} began a later start as rank 0")


def _claim(store: Store, rank: int, hello: str, restarts: bool) -> str:
    """Write this process's greeting as `rank`, and return the greeting that stands.

    With `restarts` the greeting of a process of this host that has ended is replaced.
    """
    key = f"start/hello/{rank}"
    before = store.compare_set(key, "", hello).decode()
    if restarts and before not in (hello, _ALARM):
        _, host, pid, _ = before.split()
        if host == socket.gethostname() and not _is_running(int(pid)):
            before = store.compare_set(key, before, hello).decode()
    return before


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _judge(store: Store, world: int, deadline: float, timeout: float) -> None:
    """Rank 0: wait for all greetings, compare them, publish the verdict."""
    keys = [f"start/hello/{r}" for r in range(world)]
    try:
        values = _within(store, deadline, lambda: store.multi_get(keys))
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        came = _came(store, world)
        values = store.multi_get([keys[r] for r in came])
        if len({value.split()[0] for value in values}) == 1 and len(came) < world:
            store.compare_set(VERDICT, "", f"{_FAIL}missing:{_missing(world, came, timeout)}")
            return
    else:
        came = list(range(world))
    hellos = [value.decode() for value in values]
    if _ALARM in hellos:
        return  # whoever raised the alarm publishes the verdict
    first: dict[str, int] = {}
    for rank, hello in zip(came, hellos, strict=True):
        first.setdefault(hello.split()[0], rank)
    if len(first) == 1:
        store.compare_set(VERDICT, "", "ok")
        return
    # Also where ranks are missing: different settings, such as another WORLD_SIZE, may be why.
    store.compare_set(VERDICT, "", "explain:" + json.dumps(list(first.values())[:_EXPLAINED]))


def _difference(store: Store, world: int, speakers: list[int], deadline: float) -> str:
    """Which ranks differ from the most common settings, and in which key first."""
    told: dict[int, dict[str, str]] = {}
    for speaker in speakers:
        text = _await(store, f"start/facts/{speaker}", deadline)
        if text is not None:
            told[speaker] = json.loads(text)
    if len(told) < 2:
        return f"config:ranks {ranges(speakers)} were started with different settings; start all of them alike"
    came = _came(store, world)
    hellos = store.multi_get([f"start/hello/{r}" for r in came])
    marks = {r: hello.decode().split()[0] for r, hello in zip(came, hellos, strict=True)}
    ranks = {speaker: [r for r in came if marks[r] == marks[speaker]] for speaker in told}
    usual = max(told, key=lambda speaker: (len(ranks[speaker]), -speaker))
    parts = []
    for speaker in sorted(told):
        if speaker == usual:
            continue
        # Order of the first speaker's keys: versions come first, then settings in the tree's order.
        for key in [*told[usual], *told[speaker]]:
            here, there = told[speaker].get(key, "not set"), told[usual].get(key, "not set")
            if here != there:
                who = f"rank{'s' * (len(ranks[speaker]) > 1)} {ranges(ranks[speaker])}"
                parts.append(f"{key} is {here} on {who} but {there} on {_others(ranks[usual])}")
                break
    return (
        f"config:the ranks were not started alike: {'; '.join(parts)}; give every rank the same configuration file, "
        "overrides and installed versions"
    )


def _came(store: Store, world: int) -> list[int]:
    return [rank for rank in range(world) if store.check([f"start/hello/{rank}"])]


def _others(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _alarm(store: Store, places: int, message: str) -> None:
    """Publish a failure at once."""
    store.compare_set(VERDICT, "", f"{_FAIL}config:{message}")
    _fill_places(store, places)
    raise ConfigError(message)


def _fill_places(store: Store, places: int) -> None:
    """Fill the empty places of greetings, so that rank 0, which waits for them, wakes."""
    for rank in range(places):
        store.compare_set(f"start/hello/{rank}", "", _ALARM)


def _await(store: Store, key: str, deadline: float) -> str | None:
    """The value of `key`, or None if it does not come in time."""
    try:
        return _within(store, deadline, lambda: store.get(key)).decode()
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        return store.get(key).decode() if store.check([key]) else None


def _within(store: Store, deadline: float, read: Callable[[], T]) -> T:
    """Run a waiting read with the store's time-out set to what is left."""
    usual = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(0.01, deadline - time.monotonic())))
    try:
        return read()
    finally:
        store.set_timeout(usual)


def _missing(world: int, came: list[int], timeout: float) -> TrainingError:
    absent = sorted(set(range(world)) - set(came)) or [0]  # all greeted, but rank 0 gave no verdict
    plural = "s" if len(absent) > 1 else ""
    return TrainingError(
        f"rank{plural} {ranges(absent)} of {world} did not come within rendezvous.timeout={timeout:g} "
        f"seconds ({len(came)} did); look at {'their' if plural else 'its'} log and host, or raise --rendezvous.timeout"
    )


def ranges(ranks: Iterable[int], limit: int = 12) -> str:
    """Ranks as a person writes them: `0-3, 7`; long lists are cut."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more stretches" if len(words) > limit else "")
