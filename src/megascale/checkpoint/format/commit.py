"""The COMMIT record of a checkpoint and its checks. It is the first file read, and its writer is not trusted. No torch.

A checksum detects disk errors but not a forged file, so every field is checked before it is used.
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
METADATA = ".metadata"
COMMIT_BYTES = 16 << 20  # upper limit of a COMMIT: a hundred thousand files need ten
GENERATION = re.compile(r"([0-9]{8})-[0-9a-f]{8}")
_MAX_BYTES = 1 << 62  # of all files: sums of it fit into 64 bits
_KEYS = {"format", "step", "generation", "files", "state"}


class DamagedCheckpoint(Exception):
    """A committed checkpoint differs from what was written; the message names the file and the difference."""


@dataclass(frozen=True)
class Commit:
    """The contents of COMMIT.

    Attributes:
        step: optimizer steps done.
        generation: number of the save in its folder and a random part; its files' names begin with it.
        files: (bytes, CRC-32) by name of every file of the checkpoint.
        state: the trainer's saved state besides tensors.
    """

    step: int
    generation: str
    files: dict[str, tuple[int, int]]
    state: dict[str, Any]

    @property
    def sequence(self) -> int:
        """Return the number of the save in its folder."""
        return int(self.generation[:8])

    @property
    def index_file(self) -> str:
        """Return the name of the index file."""
        return f"{self.generation}-index.npz"

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        """Return COMMIT's text: one JSON object, then its checksum."""
        body = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True).encode()
        return body + b"\n" + f"{crc32(body):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commit:
        """Parse COMMIT's text. Raises DamagedCheckpoint if it was altered or cut, or if a field is invalid."""
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != f"{crc32(body):08x}".encode():
            raise DamagedCheckpoint("COMMIT does not match its own checksum")
        try:
            record = strict_json.loads(body, COMMIT_BYTES)
        except ValueError as error:
            raise DamagedCheckpoint(f"COMMIT is not readable JSON: {error}") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DamagedCheckpoint(f"COMMIT is not of format {FORMAT}, the only one that this release reads")
        if record.keys() != _KEYS:
            keys = ", ".join(sorted(record))[:200]
            raise DamagedCheckpoint(f"COMMIT has the keys {keys}, not {', '.join(sorted(_KEYS))}")
        step = record["step"]
        if type(step) is not int or not 0 <= step < _MAX_BYTES:
            raise DamagedCheckpoint(f"COMMIT has the invalid step {str(step)[:50]}")
        generation = record["generation"]
        if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
            raise DamagedCheckpoint(f"COMMIT has the invalid generation {str(generation)[:50]!r}")
        if not isinstance(record["state"], dict):
            raise DamagedCheckpoint("COMMIT holds no trainer state")
        return cls(step, generation, _parse_files(record["files"]), record["state"])


def _parse_files(record: Any) -> dict[str, tuple[int, int]]:
    if not isinstance(record, dict):
        raise DamagedCheckpoint("COMMIT names no files")
    files = {}
    for name, entry in record.items():
        if not is_plain_name(name):
            raise DamagedCheckpoint(f"COMMIT names the file {name[:200]!r}, which is not a plain name in its folder")
        if not isinstance(entry, list) or len(entry) != 2 or any(type(n) is not int or n < 0 for n in entry):
            raise DamagedCheckpoint(f"COMMIT does not give the size and checksum of {name}")
        files[name] = (entry[0], entry[1])
    if sum(size for size, _ in files.values()) > _MAX_BYTES:
        raise DamagedCheckpoint(f"COMMIT gives its files more than {_MAX_BYTES:,} bytes")
    return files
