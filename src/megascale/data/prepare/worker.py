"""`python -m megascale.data.prepare.worker`: encodes the pieces that its parent names on standard input.

Lines of JSON both ways. In: first the job (Job), then one piece a line. Out: `{"used": bytes}`, `{"done": number}`,
or `{"error": text}` and the end. The worker ends when its input does, so it never outlives its parent by more than
a batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.data.dataset.sources import InputPiece
from megascale.data.prepare.encode import encode
from megascale.data.prepare.split import Split
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import MegascaleError


@dataclass(frozen=True)
class EncodeJob:
    """What all pieces of a build share.

    Attributes:
        folder: where parts go.
        tokenizer: path of the tokenizer.json.
        key: name of the text in jsonl and parquet.
        split: the rule that deals documents out.
    """

    folder: str
    tokenizer: str
    key: str
    split: Split

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> EncodeJob:
        """The inverse of to_json."""
        record = json.loads(line)
        return cls(**{**record, "split": Split(**record["split"])})


def _say(**record: object) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends its workers
    try:
        job = EncodeJob.from_json(sys.stdin.readline())
        words = load_tokenizer(job.tokenizer)
        for line in sys.stdin:
            piece = InputPiece(**json.loads(line))
            encode(piece, words, job.split, job.key, Path(job.folder), lambda used: _say(used=used))
            _say(done=piece.number)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone; flushing its pipe again would only complain
    except MegascaleError as error:
        _say(error=str(error))
    except OSError as error:
        _say(error=f"writing into {job.folder} failed: {error}", errno=error.errno)


if __name__ == "__main__":
    main()
