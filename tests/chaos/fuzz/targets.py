"""Readers of untrusted files and messages, each fed with sound input that was changed at random.

A target makes sound input once, then `feed` changes it by a random generator and gives it to the reader, which reads it
or raises one of its own errors. Anything else, and anything slow, is a find; its seed makes it again.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Feed = Callable[[random.Random], None]


@dataclass(frozen=True)
class Target:
    """name: for `--targets`; make: given a folder of its own, returns what feeds the reader."""

    name: str
    make: Callable[[Path], Feed]


_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    math.inf,
    math.nan,
    "",
    "\0",
    "a" * 5000,
    "../../etc/passwd",
    "/",
    "\ud800",
    "é",
    "[/red]",
    [],
    {},
    [[]],
    {"": {}},
    [0] * 100,
    {"a": None},
)


def odd_json(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with something in it replaced, left out, doubled or nested."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(["", "extra", key + "x", "\0"]): rng.choice(_ODD)}
        return {**value, key: odd_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at:] * rng.choice((0, 2))
        return value[:at] + [odd_json(rng, value[at])] + value[at + 1 :]
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 50, 300))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    if isinstance(value, int | float) and rng.random() < 0.3:
        with contextlib.suppress(OverflowError):
            return value + rng.choice((-1, 1, 0.5, 1 << 32))
    return rng.choice(_ODD)


def odd_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy of some bytes with a few changed, cut out, doubled or put in."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        at = rng.randrange(len(result) + 1)
        stop = min(len(result), at + rng.choice((1, 2, 4, 8, 64, 1000)))
        kind = rng.randrange(5)
        if kind == 0:
            result[at:stop] = rng.randbytes(stop - at)
        elif kind == 1:
            del result[at:stop]
        elif kind == 2:
            result[at:at] = result[at:stop] * rng.choice((1, 3))
        elif kind == 3:
            word = rng.choice((0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1))
            result[at:stop] = word.to_bytes(8, rng.choice(("little", "big")))[: stop - at]
        else:
            result[at:] = b""
    return bytes(result)


def _text(rng: random.Random, value: Any) -> bytes:
    return json.dumps(odd_json(rng, value)).encode()


def _sound_run(folder: Path) -> Path:
    """A run with a checkpoint of step 1."""
    import torch

    from megascale.checkpoint import TensorShard, save

    tensors = {f"model.layers.{i}.weight": torch.arange(12.0).reshape(3, 4) for i in range(3)}
    tensors["optimizer.step"] = torch.tensor(1)
    shards = [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    save(folder / "sound" / "checkpoints", 1, shards, {"step": 1, "config": {"model": {"layers": 3}}}, keep=1)
    return folder / "sound"


def _commit(folder: Path) -> Feed:
    from megascale.checkpoint.format.archive import crc32
    from megascale.checkpoint.format.commit import Commit, DamagedCheckpoint

    data = (_sound_run(folder) / "checkpoints" / "step-1" / "COMMIT").read_bytes()
    record = json.loads(data.partition(b"\n")[0])

    def feed(rng: random.Random) -> None:
        body = _text(rng, record) if rng.random() < 0.8 else odd_bytes(rng, data.partition(b"\n")[0])
        with contextlib.suppress(DamagedCheckpoint):
            Commit.from_bytes(body + b"\n" + f"{crc32(body):08x}\n".encode())

    return feed


def _index(folder: Path) -> Feed:
    from megascale.checkpoint.format.index import CheckpointIndex

    data = next((_sound_run(folder) / "checkpoints" / "step-1").glob("*-index.npz")).read_bytes()

    def feed(rng: random.Random) -> None:
        with contextlib.suppress(ValueError):
            CheckpointIndex.from_bytes(odd_bytes(rng, data))

    return feed


def _checkpoint(folder: Path) -> Feed:
    """Columns, header and record changed, with all checksums right, read by everything that reads one."""
    import warnings

    import numpy as np
    import torch

    from megascale.checkpoint import TensorShard, inspect, load
    from megascale.checkpoint.complete_checkpoint import open_checkpoint
    from megascale.checkpoint.format.verify import verify
    from megascale.checkpoint.storage.opening import open_storage
    from megascale.errors import MegascaleError
    from tests.chaos.fuzz.crafted_checkpoints import edit_commit, edit_index

    sound = _sound_run(folder)
    arguments = np.array([-1, 0, 1, 2, 3, 4, 12, 64, 1 << 20, (1 << 31) - 1, (1 << 62), (1 << 63) - 1, -(1 << 63)])

    def change(rng: random.Random, header: dict[str, Any], columns: dict[str, Any]) -> None:
        if rng.random() < 0.4:
            second = odd_json(rng, dict(header))  # which may lie within it
            header.clear()
            header.update(second if isinstance(second, dict) else {})
            return
        for _ in range(rng.choice((1, 2))):
            column = columns[rng.choice(list(columns))]
            with contextlib.suppress(OverflowError, ValueError):  # numbers too long for their column
                column.flat[rng.randrange(column.size)] = int(rng.choice(arguments))
        if rng.random() < 0.2:
            rows = rng.sample(range(4), rng.randrange(5))
            for name in columns:
                columns[name] = columns[name][rows]

    def feed(rng: random.Random) -> None:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(sound, run)
        location = run / "checkpoints" / "step-1"
        with contextlib.suppress(StopIteration):
            if rng.random() < 0.7:
                edit_index(location, lambda header, columns: change(rng, header, columns))
            else:
                edit_commit(location, lambda record: odd_json(rng, record))
        inspect(run)
        verify(open_storage(run / "checkpoints"), 1)
        with contextlib.suppress(MegascaleError):
            full = open_checkpoint(run)
            for name in full.tensors:
                full.read_tensor(name)
        target = torch.zeros(3, 4)
        with contextlib.suppress(MegascaleError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(run / "checkpoints", [TensorShard("model.layers.0.weight", (3, 4), (0, 0), target)])

    return feed


def _model(folder: Path) -> Feed:
    from megascale.errors import DataError
    from megascale.model.huggingface.import_model import read_folder
    from tests.chaos.fuzz.crafted_models import SETTINGS, write_model

    sound = {family: folder / family for family in SETTINGS}
    for family, location in sound.items():
        write_model(location, family)
    more = {
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e4, "tie_word_embeddings": False, "head_dim": 6,
        "layer_types": ["full_attention"] * 2, "sliding_window": 4, "use_sliding_window": True, "rotary_pct": 1.0,
        "attention_dropout": 0.0, "hidden_act": "silu", "activation_function": "gelu", "auto_map": {},
    }  # fmt: skip

    def feed(rng: random.Random) -> None:
        position = sound[rng.choice(list(sound))]
        settings, tensors = (position / "config.json").read_bytes(), (position / "model.safetensors").read_bytes()
        index, shard = position / "model.safetensors.index.json", position / "shard.safetensors"
        generation = position / "generation_config.json"
        try:
            if rng.random() < 0.7:
                record = json.loads(settings)
                record |= {key: more[key] for key in rng.sample(sorted(more), rng.randrange(3))}
                (position / "config.json").write_bytes(_text(rng, record))
            elif rng.random() < 0.5:
                (position / "model.safetensors").write_bytes(
                    odd_bytes(rng, tensors[: rng.choice((8, 400, len(tensors)))])
                )
            else:
                (position / "model.safetensors").rename(shard)  # it would be read before an index
                index.write_bytes(_text(rng, {"weight_map": {"wte.weight": shard.name}}))
            if rng.random() < 0.1:
                generation.write_bytes(_text(rng, {"eos_token_id": [0, 1], "bos_token_id": 0}))
            with contextlib.suppress(DataError):
                read_folder(position)
        finally:
            (position / "config.json").write_bytes(settings)
            (position / "model.safetensors").write_bytes(tensors)
            for file in (index, shard, generation):
                file.unlink(missing_ok=True)

    return feed


def _pickles(folder: Path) -> Feed:
    """Indexes of foreign checkpoints and flight-recorder dumps."""
    import pickle

    import torch.distributed.checkpoint  # noqa: F401 - else the first input takes the time of it

    from megascale.checkpoint.format.foreign_index import read_torch_index
    from megascale.errors import DataError
    from megascale.observe.hang.flight import read_flight

    index = (_sound_run(folder) / "checkpoints" / "step-1" / ".metadata").read_bytes()
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "collective_seq_id": 1}
    dump = {"pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "entries": [entry | {"state": "completed"}]}
    file = folder / "trace_0"

    def feed(rng: random.Random) -> None:
        kind = rng.randrange(3)
        file.write_bytes((odd_bytes(rng, index), odd_bytes(rng, pickle.dumps(dump, 2)), _text(rng, dump))[kind])
        with contextlib.suppress(DataError):
            if kind:
                read_flight(file)
            else:
                read_torch_index(file)

    return feed


def _journal(folder: Path) -> Feed:
    """The driver's journal, taken by the next driver and read by a command, and its copy in events.jsonl."""
    from megascale.errors import DataError, TrainingError
    from megascale.resilience.driver.state.audit_log import AuditLog, read_logged_events, restore_lost_events
    from megascale.resilience.driver.state.journal import JOURNAL_FILE, Journal
    from megascale.resilience.driver.state.journal_reader import JournalReader

    sound, run = folder / "sound", folder / "run"
    sound.mkdir()
    journal, _ = Journal.take(sound, 0.05)
    log = AuditLog(sound, journal, lambda source, text: None)
    for number in range(20):
        log.record("hang", attempt=number, nodes=("n0",), evidence=("x" * 50,), extra={"a": [1]})
    journal.close()
    data, lines = (sound / JOURNAL_FILE).read_bytes(), (sound / "events.jsonl").read_bytes().splitlines()

    def feed(rng: random.Random) -> None:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        changed = list(lines)
        for _ in range(3):
            at = rng.randrange(len(changed))
            line = changed[at]
            changed[at] = odd_bytes(rng, line) if rng.random() < 0.5 else _text(rng, json.loads(lines[at]))
        (run / "events.jsonl").write_bytes(b"\n".join(changed))
        list(read_logged_events(run))
        (run / JOURNAL_FILE).write_bytes(odd_bytes(rng, data))
        with contextlib.suppress(DataError):
            reader = JournalReader(run)
            with contextlib.closing(reader):
                reader.events()
                reader.nodes()
        with contextlib.suppress(TrainingError, DataError):
            repeated, _ = Journal.take(run, 0.05)
            with contextlib.closing(repeated):
                restore_lost_events(repeated, run)
                repeated.add("after", attempt=1)

    return feed


def _frames(folder: Path) -> Feed:
    """Yield messages of the ports of driver and services: heads, greetings, and the messages of every protocol."""
    import msgspec

    from megascale.checkpoint.background import service_protocol
    from megascale.data.loader import host_plan
    from megascale.resilience.protocol import agent_messages, fork_messages
    from megascale.services import service_location
    from megascale.services.framing import HEAD, ProtocolError, make_greeting, make_head, read_greeting, read_head
    from megascale.services.messages import Schema

    modules = (agent_messages, fork_messages, host_plan, service_protocol, service_location)
    schemas = [value for module in modules for value in vars(module).values() if isinstance(value, Schema)]
    full = make_greeting(bytes(32))
    kinds = [(schema, do, kind) for schema in schemas for do, kind in schema.types.items()]
    values = tuple(value for value in _ODD if value not in (2**64, 10**30, 10**400, "\ud800", -(2**63))) + (
        b"",
        b"a" * 64,
    )

    def feed(rng: random.Random) -> None:
        with contextlib.suppress(ProtocolError):
            read_head(odd_bytes(rng, make_head(100, 5, 1))[: HEAD.size].ljust(HEAD.size, b"\0"), 1000, 50)
        with contextlib.suppress(ProtocolError):
            read_greeting(odd_bytes(rng, full)[: len(full)].ljust(len(full), b"\0"))
        schema, do, kind = rng.choice(kinds)
        record: dict[str, Any] = {"do": do}
        for field in msgspec.structs.fields(kind):
            if field.required or rng.random() < 0.3:
                record[field.encode_name] = rng.choice(values) if rng.random() < 0.3 else rng.randrange(3)
        body = msgspec.msgpack.encode(record)
        for data in (body, odd_bytes(rng, body), rng.randbytes(rng.randrange(60))):
            with contextlib.suppress(ProtocolError):
                schema.decode(data)

    return feed


def _data(folder: Path) -> Feed:
    """Token files with their manifest, and status files of ranks."""
    import numpy as np

    from megascale.core.status import StatusFile, read_status
    from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter
    from megascale.data.dataset.manifest import (
        CompressedSizes,
        DataSetPart,
        Manifest,
        check_sampled_tokens,
        find_part,
        read_manifest,
    )
    from megascale.errors import DataError

    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(5):
            writer.add_document([np.arange(7)])
    index = (folder / "train.idx").read_bytes()
    part = DataSetPart(
        documents=5,
        tokens=35,
        bytes=70,
        bin_bytes=70,
        idx_bytes=len(index),
        idx_sha256="a",
        bin_fingerprint="b",
        compressed=CompressedSizes(bytes=70, zlib=20, xz=30),
    )
    manifest = Manifest(["text"], "a", {"file": "tokenizer.json"}, "uint16", {"train": part}, skipped={"empty": 1})
    manifest.save(folder)
    assert read_manifest(folder) == manifest  # else each changed copy would be refused for the same reason
    sound_manifest = asdict(manifest)
    status = StatusFile(folder, 0)
    status.update("train", 3)
    full = (folder / "rank-0.status").read_bytes()
    status.close()

    def feed(rng: random.Random) -> None:
        (folder / "train.idx").write_bytes(odd_bytes(rng, index))
        with contextlib.suppress(DataError):
            result = IndexedDataset(folder / "train")
            result.verify()
            for i in range(min(len(result), 10)):
                result.read_sequence(i)
            for i in range(min(result.documents, 10)):
                result.read_document(i)
        (folder / "dataset.json").write_bytes(_text(rng, sound_manifest))
        with contextlib.suppress(DataError):
            changed = read_manifest(folder)
            assert changed is not None
            assert all(isinstance(part.tokens, int) and part.bytes_per_token >= 0 for part in changed.parts.values())
        with contextlib.suppress(DataError):
            find_part(folder / "train")
            check_sampled_tokens("data.train", str(folder / "train"))
        (folder / "rank-0.status").write_bytes(odd_bytes(rng, full))
        read_status(folder / "rank-0.status")

    return feed


def _http(folder: Path) -> Feed:
    """The guard of the API, and behind it an application that reads what it is given."""
    import asyncio

    from megascale.resilience.driver.api.access import ApiTokens
    from megascale.resilience.driver.api.http_limits import BODY_BYTES, Guard

    tokens = ApiTokens(b"r" * 64, b"a" * 64)
    served: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(len((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(app, tokens, ["here"])
    names = (b"host", b"origin", b"authorization", b"content-length", b"transfer-encoding", b"x")
    values = (
        b"here",
        b"127.0.0.1:1",
        b"[::1]",
        b"Bearer " + tokens.act,
        b"Bearer " + tokens.read,
        b"0",
        b"300000",
        b"",
    )

    def feed(rng: random.Random) -> None:
        headers = [
            (rng.choice(names), rng.choice(values) if rng.random() < 0.7 else odd_bytes(rng, rng.choice(values)))
            for _ in range(rng.randrange(8))
        ]
        shown = any(value == b"Bearer " + token for _, value in headers for token in (tokens.act, tokens.read))
        pieces = [rng.randbytes(rng.choice((0, 10, 200_000))) for _ in range(rng.randrange(4))]
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        messages.append(rng.choice([{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]))
        requested, output = list(messages), []

        async def receive() -> Any:
            return requested.pop(0) if requested else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            output.append(message)

        scope = {"type": "http", "method": rng.choice(["GET", "POST", "HEAD", "\xff"]), "scheme": "http", "path": "/"}
        served.clear()
        asyncio.run(guard(scope | {"headers": headers}, receive, send))
        if not shown and (served or len(requested) != len(messages)):
            raise AssertionError(f"without a token it was served or read: {headers}")
        if served and served[0] > BODY_BYTES:
            raise AssertionError(f"{served[0]} bytes were handed on")

    return feed


TARGETS: tuple[Target, ...] = (
    Target("commit", _commit),
    Target("index", _index),
    Target("checkpoint", _checkpoint),
    Target("model", _model),
    Target("pickles", _pickles),
    Target("journal", _journal),
    Target("frames", _frames),
    Target("data", _data),
    Target("http", _http),
)
