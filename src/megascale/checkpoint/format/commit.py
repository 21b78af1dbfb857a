"""COMMIT file of a checkpoint: its contents, and the checks when it is read. Needs no torch.

COMMIT is the first file that a load reads, and its writer is not trusted. The checksum detects disk errors but not a
forged file, so every field is checked before it is used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from megascale.checkpoint.format.archive import crc32
from megascale.core import strict_json
from megascale.core.untrusted_files import is_plain_name

COMMIT = "COMMIT"
FORMAT = 1
METADATA = ".metadata"  # name of the index in the format of torch.distributed.checkpoint
MAX_COMMIT_BYTES = 16 << 20  # a COMMIT with a hundred thousand files has ten million bytes
GENERATION = re.compile(r"([0-9]{8})-[0-9a-f]{8}")
_MAX_CHECKPOINT_BYTES = 1 << 62  # so that sums of sizes fit into 64 bits
_KEYS = {"format", "step", "generation", "files", "state"}


class DamagedCheckpoint(Exception):
    """Error for a committed checkpoint that differs from what was written. It names the file and the difference."""


@dataclass(frozen=True)
class Commit:
    """Contents of COMMIT.

    Attributes:
        step: number of completed optimizer steps.
        generation: number of the save in its folder, then a random part. The names of the save's files begin with it.
        files: size in bytes and CRC-32 of every file of the checkpoint, by name.
        state: saved state of the trainer besides tensors.
    """

    step: int
    generation: str
    files: dict[str, tuple[int, int]]
    state: dict[str, Any]

    @property
    def sequence(self) -> int:
        """Return the number of the save, which increases over all saves of the folder."""
        return int(self.generation[:8])

    @property
    def index_file(self) -> str:
        return f"{self.generation}-index.npz"

    @property
    def size(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the text of COMMIT: one JSON object, then a line with its checksum."""
        body = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True).encode()
        return body + b"\n" + f"{crc32(body):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commit:
        """Parse the text of COMMIT. Raises DamagedCheckpoint if it was altered or truncated, or a field is invalid."""
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != f"{crc32(body):08x}".encode():
            raise DamagedCheckpoint("COMMIT does not match its own checksum")
        try:
            record = strict_json.loads(body, MAX_COMMIT_BYTES)
        except ValueError as error:
            raise DamagedCheckpoint(f"COMMIT is not readable JSON: {error}") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DamagedCheckpoint(f"COMMIT is not of format {FORMAT}, the only one that this release reads")
        if record.keys() != _KEYS:
            keys = ", ".join(sorted(record))[:200]
            raise DamagedCheckpoint(f"COMMIT has the keys {keys}, not {', '.join(sorted(_KEYS))}")
        step = record["step"]
        if type(step) is not int or not 0 <= step < _MAX_CHECKPOINT_BYTES:
            raise DamagedCheckpoint(f"COMMIT has the invalid step {str(step)[:50]}")
        generation = record["generation"]
        if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
            raise DamagedCheckpoint(f"COMMIT has the invalid generation {str(generation)[:50]!r}")
        if not isinstance(record["state"], dict):
            raise DamagedCheckpoint("COMMIT holds no trainer state")
        return cls(step, generation, _parse_files(record["files"]), record["state"])


def _parse_files(record: Any) -> dict[str, tuple[int, int]]:
    """Return size and CRC-32 by file name. Raises DamagedCheckpoint for an invalid name, size or checksum."""
    if not isinstance(record, dict):
        raise DamagedCheckpoint("COMMIT names no files")
    files = {}
    for name, size_and_crc in record.items():
        if not is_plain_name(name):
            raise DamagedCheckpoint(f"COMMIT names the file {name[:200]!r}, which is not a plain name in its folder")
        is_pair = isinstance(size_and_crc, list) and len(size_and_crc) == 2
        if not is_pair or any(type(number) is not int or number < 0 for number in size_and_crc):
            raise DamagedCheckpoint(f"COMMIT does not give the size and checksum of {name}")
        size, crc = size_and_crc
        files[name] = (size, crc)
    if sum(size for size, _ in files.values()) > _MAX_CHECKPOINT_BYTES:
        raise DamagedCheckpoint(f"COMMIT gives its files more than {_MAX_CHECKPOINT_BYTES:,} bytes")
    return files
