"""Agreement of all ranks at the start of a job: all ranks are present, and all have the same settings.

Each rank writes a greeting with the hash of its settings into the store. Rank 0 waits for all greetings, compares them
and publishes a verdict, which every rank reads. Each rank makes two small store calls for any number of ranks; rank
0 also reads all greetings. If a rank is missing, comes twice or has other settings, the error on each rank names it.
The module works with any torch Store.
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
from typing import NamedTuple, TypeVar

from torch.distributed import DistError, Store

from megascale.errors import ConfigError, TrainingError
from megascale.rendezvous.stores import StoreFault, Superseded

T = TypeVar("T")
# Keys of the store; the last two end with a rank.
VERDICT = "start/verdict"
_FINAL_VERDICT = "start/final"  # the verdict after the ranks of an `_EXPLAIN` verdict have published their settings
_SETTINGS_KEY = "start/facts"  # settings of a rank that must explain a difference
_READER_KEY = "start/told"  # set by a rank that has read the verdict
_GREETING_KEY = "start/hello"  # hash of settings, host, process id and a random text of a rank; or `_ALARM`
# The verdict is "ok" or text that starts with one of these prefixes.
_FAIL = "fail:"  # then "missing:" or "config:", and the message of the error
_EXPLAIN = "explain:"  # then the ranks that must publish their settings, as JSON
_SUPERSEDED = "superseded:"  # then a description of the process that began a later start
# Written instead of a rank's greeting, so that rank 0 stops waiting when another rank has published the verdict.
_ALARM = "!"
# Ranks wait longer for rank 0's verdict than rank 0 waits for their greetings, so that the verdict reaches them.
_GRACE_SECONDS = 5.0
_READERS_SECONDS = 10.0  # longest time that rank 0 keeps a store open after a failure, for the other ranks to read why
_MAX_EXPLAINING_RANKS = 4  # differing ranks that publish their settings, which bounds the length of the message


def hash_settings(shared_settings: Mapping[str, str]) -> str:
    """Return a hash of the settings, 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(shared_settings, sort_keys=True).encode()).hexdigest()[:24]


def agree(
    store: Store,
    rank: int,
    world: int,
    shared_settings: Mapping[str, str],
    timeout: float,
    configured_timeout: float | None = None,
    *,
    may_restart: bool = False,
) -> None:
    """Wait until `world` ranks with equal `shared_settings` are present. Otherwise raise the same error on each rank.

    Args:
        store: store of the job. The agreement uses keys that start with `start/`.
        world: number of ranks.
        shared_settings: versions and settings by key, as text, that must be equal on all ranks. No secrets.
        timeout: seconds to wait for the last rank.
        configured_timeout: value of `rendezvous.timeout` for error messages. Earlier steps may have used a part of it,
            and `timeout` is the remaining part. Default: `timeout`.
        may_restart: whether processes may be restarted on this store. A greeting may then come from a process that has
            ended.

    Raises:
        ConfigError: two processes have the same rank, or ranks differ in world size, settings or versions. The message
            names the ranks and the key.
        TrainingError: ranks are missing after `timeout` seconds. The message names them.
        Superseded: another rank 0 began a later start on the same store, which this rank must join.
    """
    deadline = time.monotonic() + timeout
    if configured_timeout is None:
        configured_timeout = timeout
    shared_settings = {"WORLD_SIZE": str(world), **shared_settings}
    greeting = f"{hash_settings(shared_settings)} {socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
    if not 0 <= rank < world:
        # Rank 0 may have been started with a larger world, and then also waits for ranks up to this one.
        _raise_alarm(store, rank + 1, f"rank {rank} is outside a world of {world}; ranks count from 0 to {world - 1}")
    stored_greeting = _claim_rank(store, rank, greeting, may_restart)
    if stored_greeting not in (greeting, _ALARM):
        _, host, pid, _ = stored_greeting.split()
        if may_restart and host != socket.gethostname():
            # The other process may have ended with its node. In that case rank 0 is restarted, and the verdict says
            # that this start is superseded.
            _raise_if_superseded(_read(store, VERDICT, deadline + _GRACE_SECONDS), rank)
        _raise_alarm(
            store,
            world,
            f"two processes claim rank {rank}: process {pid} on {host} and process {os.getpid()} on "
            f"{socket.gethostname()}; give each process its own RANK",
        )
    if rank == 0 and stored_greeting != _ALARM:
        _publish_verdict(store, world, deadline, configured_timeout)
    verdict = _read(store, VERDICT, deadline + _GRACE_SECONDS)
    if verdict is None:
        raise _make_missing_ranks_error(world, _list_present_ranks(store, world), configured_timeout)
    _raise_if_superseded(verdict, rank)
    if verdict.startswith(_EXPLAIN):
        verdict = _explain_difference(
            store,
            rank,
            world=world,
            shared_settings=shared_settings,
            explaining_ranks=json.loads(verdict.removeprefix(_EXPLAIN)),
            deadline=deadline,
        )
    if verdict != "ok":
        failure = parse_failure(verdict) or Failure("config", verdict)
        if failure.kind == "missing":
            raise TrainingError(failure.message)
        raise ConfigError(failure.message)


class Failure(NamedTuple):
    """Failure in a verdict: its kind, "missing" (ranks) or "config" (settings), and the message of the error."""

    kind: str
    message: str


def parse_failure(verdict: str) -> Failure | None:
    """Return the failure that a verdict describes, or None for another verdict."""
    if not verdict.startswith(_FAIL):
        return None
    kind, _, message = verdict.removeprefix(_FAIL).partition(":")
    return Failure(kind, message)


def _explain_difference(
    store: Store,
    rank: int,
    *,
    world: int,
    shared_settings: Mapping[str, str],
    explaining_ranks: list[int],
    deadline: float,
) -> str:
    """Publish the settings of `explaining_ranks`, and return the verdict in which rank 0 names the difference."""
    if rank in explaining_ranks:
        store.set(f"{_SETTINGS_KEY}/{rank}", json.dumps(dict(shared_settings)))
    if rank == 0:
        difference = _describe_difference(store, world, explaining_ranks, deadline=deadline + _GRACE_SECONDS)
        store.set(_FINAL_VERDICT, _FAIL + difference)
    # The other ranks wait longer than rank 0 waits for the settings.
    verdict = _read(store, _FINAL_VERDICT, deadline + 3 * _GRACE_SECONDS)
    if verdict is None:
        raise ConfigError(
            f"ranks {format_ranks(explaining_ranks)} were started with different settings; give every rank the same "
            "configuration and overrides"
        )
    return verdict


def wait_for_readers(store: Store, rank: int, world: int) -> None:
    """Wait on rank 0, after a failed start, until the other ranks have read why it failed.

    Rank 0 may serve the store. Without the wait, a rank that comes a little later would find no store and wait until
    its time-out. The other ranks do not wait.
    """
    store.set(f"{_READER_KEY}/{rank}", "1")
    if rank == 0:
        # Rank 0 waits only for ranks with a greeting. After an alarm all ranks have one, including those yet to come.
        greeted_ranks = _list_present_ranks(store, world)
        keys = [f"{_READER_KEY}/{reader}" for reader in greeted_ranks if reader != 0]
        with suppress(DistError):  # A rank that does not read in time must not keep rank 0.
            store.wait(keys, timedelta(seconds=_READERS_SECONDS))


def supersede(store: Store, world: int, successor: str) -> None:
    """End a start that has no verdict, so that its ranks join a later start.

    Args:
        successor: description of the process that begins the later start as rank 0.
    """
    verdict = _SUPERSEDED + successor
    if store.compare_set(VERDICT, "", verdict).decode() == verdict:
        _fill_greetings(store, world)


def _raise_if_superseded(verdict: str | None, rank: int) -> None:
    """Raise Superseded if `verdict` says that another rank 0 began a later start; on rank 0 raise ConfigError."""
    if verdict is None or not verdict.startswith(_SUPERSEDED):
        return
    successor = verdict.removeprefix(_SUPERSEDED)
    if rank == 0:
        raise ConfigError(
            f"two processes claim rank 0: process {os.getpid()} on {socket.gethostname()} and {successor}, which "
            "came later; give each process its own RANK"
        )
    raise Superseded(f"{successor} began a later start as rank 0")


def _claim_rank(store: Store, rank: int, greeting: str, may_restart: bool) -> str:
    """Write this process's greeting unless the rank has one, and return the greeting that the store then holds.

    If `may_restart`, replace the greeting of a process on this host that has ended.
    """
    key = f"{_GREETING_KEY}/{rank}"
    stored_greeting = store.compare_set(key, "", greeting).decode()
    if may_restart and stored_greeting not in (greeting, _ALARM):
        _, host, pid, _ = stored_greeting.split()
        if host == socket.gethostname() and not _is_running(int(pid)):
            stored_greeting = store.compare_set(key, stored_greeting, greeting).decode()
    return stored_greeting


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # Signal 0 only checks that the process exists.
    except ProcessLookupError:
        return False
    except PermissionError:  # The process belongs to another user.
        return True
    return True


def _publish_verdict(store: Store, world: int, deadline: float, configured_timeout: float) -> None:
    """Wait on rank 0 for all greetings, compare them, and publish the verdict."""
    keys = [f"{_GREETING_KEY}/{rank}" for rank in range(world)]
    present = list(range(world))
    try:
        values = _read_before(store, deadline, lambda: store.multi_get(keys))
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        present = _list_present_ranks(store, world)
        values = store.multi_get([keys[rank] for rank in present])
        if len({value.split()[0] for value in values}) == 1 and len(present) < world:
            missing = _make_missing_ranks_error(world, present, configured_timeout)
            store.compare_set(VERDICT, "", f"{_FAIL}missing:{missing}")
            return
    greetings = [value.decode() for value in values]
    if _ALARM in greetings:
        return  # the rank that wrote the alarm has published the verdict
    first_ranks: dict[str, int] = {}  # lowest rank by hash of settings
    for rank, greeting in zip(present, greetings, strict=True):
        first_ranks.setdefault(greeting.split()[0], rank)
    if len(first_ranks) == 1:
        store.compare_set(VERDICT, "", "ok")
        return
    # If ranks are missing too, the different settings, such as another WORLD_SIZE, may be the reason.
    store.compare_set(VERDICT, "", _EXPLAIN + json.dumps(list(first_ranks.values())[:_MAX_EXPLAINING_RANKS]))


def _describe_difference(store: Store, world: int, explaining_ranks: list[int], *, deadline: float) -> str:
    """Return the text after `_FAIL` in the final verdict: which ranks differ from the most common settings, and how.

    For each group of ranks with equal settings, the text names the first setting that differs.
    """
    settings_by_rank: dict[int, dict[str, str]] = {}  # settings that explaining ranks have published
    for explaining_rank in explaining_ranks:
        text = _read(store, f"{_SETTINGS_KEY}/{explaining_rank}", deadline)
        if text is not None:
            settings_by_rank[explaining_rank] = json.loads(text)
    if len(settings_by_rank) < 2:
        return (
            f"config:ranks {format_ranks(explaining_ranks)} were started with different settings; give every rank the "
            "same configuration and overrides"
        )
    present = _list_present_ranks(store, world)
    greetings = store.multi_get([f"{_GREETING_KEY}/{rank}" for rank in present])
    hashes = {rank: greeting.decode().split()[0] for rank, greeting in zip(present, greetings, strict=True)}
    equal_ranks: dict[int, list[int]] = {}  # present ranks with the same settings, by explaining rank
    for explaining_rank in settings_by_rank:
        settings_hash = hashes[explaining_rank]
        equal_ranks[explaining_rank] = [rank for rank in present if hashes[rank] == settings_hash]
    # The reference has the most common settings; of several such ranks it is the lowest.
    reference_rank = max(settings_by_rank, key=lambda rank: (len(equal_ranks[rank]), -rank))
    differences = []
    for explaining_rank in sorted(settings_by_rank.keys() - {reference_rank}):
        # Both dictionaries list versions first, then settings in the order of the configuration.
        for key in settings_by_rank[reference_rank] | settings_by_rank[explaining_rank]:
            value = settings_by_rank[explaining_rank].get(key, "not set")
            reference_value = settings_by_rank[reference_rank].get(key, "not set")
            if value != reference_value:
                differing_ranks = _name_ranks(equal_ranks[explaining_rank])
                reference_ranks = _name_ranks(equal_ranks[reference_rank])
                differences.append(f"{key} is {value} on {differing_ranks} but {reference_value} on {reference_ranks}")
                break
    return (
        f"config:the ranks were not started alike: {'; '.join(differences)}; give every rank the same configuration "
        "file, overrides and installed versions"
    )


def _list_present_ranks(store: Store, world: int) -> list[int]:
    """Return the ranks that have a greeting or an alarm in the store."""
    return [rank for rank in range(world) if store.check([f"{_GREETING_KEY}/{rank}"])]


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {format_ranks(ranks)}"


def _raise_alarm(store: Store, rank_count: int, message: str) -> None:
    """Publish a failure before rank 0 has all greetings, wake rank 0, and raise the failure."""
    store.compare_set(VERDICT, "", f"{_FAIL}config:{message}")
    _fill_greetings(store, rank_count)
    raise ConfigError(message)


def _fill_greetings(store: Store, rank_count: int) -> None:
    """Write an alarm for each rank below `rank_count` that has no greeting, so that rank 0 stops waiting."""
    for rank in range(rank_count):
        store.compare_set(f"{_GREETING_KEY}/{rank}", "", _ALARM)


def _read(store: Store, key: str, deadline: float) -> str | None:
    """Return the value of `key`, or None if it is not set before `deadline`."""
    try:
        return _read_before(store, deadline, lambda: store.get(key)).decode()
    except DistError as error:
        if isinstance(error, StoreFault):
            raise
        # The time has run out, but the key may have been set since.
        if not store.check([key]):
            return None
        return store.get(key).decode()


def _read_before(store: Store, deadline: float, read: Callable[[], T]) -> T:
    """Return the result of `read`, for which the store's time-out is the time that remains before `deadline`."""
    timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=max(0.01, deadline - time.monotonic())))
    try:
        return read()
    finally:
        store.set_timeout(timeout)


def _make_missing_ranks_error(world: int, present: list[int], configured_timeout: float) -> TrainingError:
    """Return the error that names the ranks below `world` that are not in `present`."""
    absent = sorted(set(range(world)) - set(present))
    if not absent:
        absent = [0]  # all greetings are there, but rank 0 published no verdict
    if len(absent) > 1:
        subject = "ranks"
        possessive = "their"
    else:
        subject = "rank"
        possessive = "its"
    return TrainingError(
        f"{subject} {format_ranks(absent)} of {world} did not come within rendezvous.timeout={configured_timeout:g} "
        f"seconds ({len(present)} did); look at {possessive} log and host, or raise --rendezvous.timeout"
    )


def format_ranks(ranks: Iterable[int], limit: int = 12) -> str:
    """Return ranks as text with ranges, such as `0-3, 7`. After `limit` ranges only the count of the others follows."""
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
