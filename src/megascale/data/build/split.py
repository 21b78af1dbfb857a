"""Which part of a data set a document belongs to: training or held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from megascale.data.dataset.sources import TextRecord

# With fewer documents than this each is cut in two, since dealing them out would leave too little on one side.
FEW = 20
_SPAN = 1 << 64


@dataclass(frozen=True)
class Split:
    """A rule.

    Attributes:
        share: part of the text to hold out.
        below: a document whose hash is below this is held out: equal documents stand on one side.
        tails: hold out the end of each document instead.
    """

    share: float
    below: int
    tails: bool = False

    @classmethod
    def by_share(cls, share: float) -> Split:
        """For text of any amount: each document by itself, so the share holds on average."""
        return cls(share, int(share * _SPAN))

    @classmethod
    def of(cls, documents: Iterable[tuple[int, int]], share: float) -> Split:
        """For known documents, (hash, bytes) each: the share of bytes is met as nearly as their sizes allow."""
        sizes: dict[int, int] = {}
        count = 0
        for place, size in documents:
            sizes[place] = sizes.get(place, 0) + size
            count += 1
        if count < FEW or len(sizes) < 2:
            return cls(share, 0, tails=True)
        ordered = sorted(sizes)
        total, taken = sum(sizes.values()), 0
        for place in ordered[:-1]:  # something is left to train on
            taken += sizes[place]
            if taken >= share * total:
                break
        return cls(share, place + 1)

    def parts(self, item: TextRecord) -> list[tuple[str, str]]:
        """(side, text) of what a document becomes: one part, two for tails, none for what was left out."""
        text = item.text
        if not text or item.side:
            return [(item.side, text)] if text else []
        if not self.tails:
            return [("valid" if place(text) < self.below else "train", text)]
        cut = int(len(text) * (1 - self.share))
        cut = text.rfind("\n", 0, cut) + 1 or cut
        return [(side, part) for side, part in (("train", text[:cut]), ("valid", text[cut:])) if part.strip()]


def place(text: str) -> int:
    """A stable 64-bit number of a text's contents."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
