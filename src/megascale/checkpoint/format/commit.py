"""What COMMIT says, and what it may say: it is read first of a checkpoint, which may be anybody's. No torch.

A checksum finds what a disk has done to it, not what a person has: every field is checked before it leads anywhere.
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
COMMIT_BYTES = 16 << 20  # most of a COMMIT: a hundred thousand files take ten
GENERATION = re.compile(r"([0-9]{8})-[0-9a-f]{8}")
_MOST_BYTES = 1 << 62  # of all files: sums of it stay whole numbers of 64 bits
_KEYS = {"format", "step", "generation", "files", "state"}


class DamagedCheckpoint(Exception):
    """A committed checkpoint that is not what was written: the message says which file and how."""


@dataclass(frozen=True)
class Commit:
    """What COMMIT says.

    Attributes:
        step: optimizer steps done.
        generation: number of this save in its folder and a random part; begins the names of its files.
        files: name to (bytes, CRC-32) of every file that belongs to it.
        state: what the trainer gave besides tensors.
    """

    step: int
    generation: str
    files: dict[str, tuple[int, int]]
    state: dict[str, Any]

    @property
    def sequence(self) -> int:
        """Number of this save in its folder."""
        return int(self.generation[:8])

    @property
    def index_file(self) -> str:
        """Name of the index."""
        return f"{self.generation}-index.npz"

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> bytes:
        """COMMIT's text: one JSON object, then its checksum."""
        body = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True).encode()
        return body + b"\n" + f"{crc32(body):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commit:
        """The inverse; Damaged if the text was altered or cut, or says what no COMMIT does."""
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != f"{crc32(body):08x}".encode():
            raise DamagedCheckpoint("COMMIT does not match its own checksum")
        try:
            record = strict_json.loads(body, COMMIT_BYTES)
        except ValueError as error:
            raise DamagedCheckpoint(f"COMMIT is no JSON that can be read: {error}") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise DamagedCheckpoint("COMMIT is of a format that this version does not know")
        if record.keys() != _KEYS:
            raise DamagedCheckpoint(
                f"COMMIT has the keys {', '.join(sorted(record))[:200]}, not {', '.join(sorted(_KEYS))}"
            )
        step, generation, state = record["step"], record["generation"], record["state"]
        if type(step) is not int or not 0 <= step < _MOST_BYTES:
            raise DamagedCheckpoint(f"COMMIT says step {str(step)[:50]}")
        if not isinstance(generation, str) or not GENERATION.fullmatch(generation):
            raise DamagedCheckpoint(f"COMMIT says generation {str(generation)[:50]!r}")
        if not isinstance(state, dict):
            raise DamagedCheckpoint("COMMIT holds no state of a trainer")
        return cls(step, generation, _files(record["files"]), state)


def _files(found: Any) -> dict[str, tuple[int, int]]:
    if not isinstance(found, dict):
        raise DamagedCheckpoint("COMMIT names no files")
    files = {}
    for name, about in found.items():
        if not is_plain_name(name):
            raise DamagedCheckpoint(f"COMMIT names the file {name[:200]!r}, which is not one of its folder")
        if not isinstance(about, list) or len(about) != 2 or any(type(n) is not int or n < 0 for n in about):
            raise DamagedCheckpoint(f"COMMIT does not say how long {name} is")
        files[name] = (about[0], about[1])
    if sum(size for size, _ in files.values()) > _MOST_BYTES:
        raise DamagedCheckpoint("COMMIT says that its files are larger than any storage")
    return files
