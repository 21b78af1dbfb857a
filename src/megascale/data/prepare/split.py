"""Which part of a data set a document belongs to: training or held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from megascale.data.dataset.sources import TextRecord

# With fewer documents than this each is cut in two, since dealing them out would leave too little on one side.
FEW = 20
_SPAN = 1 << 64
# Of text of unknown documents, those beyond this part of what is to be held out are cut: chance then deals out about
# as much as was asked for.
_UNKNOWN_PART = 8
_LEAST_CUT = 1 << 16  # bytes


@dataclass(frozen=True)
class Split:
    """A rule that deals documents to training and held-out text. It is the same for equal documents.

    Attributes:
        share: part of the text to hold out.
        below: a document whose hash is below this is held out.
        cut_above: a document of more bytes gives its end instead, in the proportion of `share`.
        trained: hashes of documents that are trained on although they are below, as they are repeated too often.
    """

    share: float
    below: int
    cut_above: int
    trained: tuple[int, ...] = ()

    @classmethod
    def by_share(cls, share: float, total: int) -> Split:
        """Return the rule for `total` bytes of text in unknown documents: the share holds on average."""
        return cls(share, int(share * _SPAN), max(_LEAST_CUT, int(share * total) // _UNKNOWN_PART))

    @classmethod
    def by_ends(cls, share: float) -> Split:
        """Return the rule by which each document gives its end."""
        return cls(share, 0, 0)

    @classmethod
    def for_documents(cls, documents: Iterable[tuple[int, int]], share: float) -> Split:
        """Return the rule for known documents, (hash, bytes) each: it meets the share as nearly as they allow."""
        sizes: dict[int, int] = {}
        groups: dict[int, int] = {}
        count = 0
        for hash_, size in documents:
            sizes[hash_] = size
            groups[hash_] = groups.get(hash_, 0) + size
            count += 1
        if count < FEW or len(sizes) < 2:
            return cls.by_ends(share)
        cut_above = int(share * sum(groups.values()))
        whole = {hash_: groups[hash_] for hash_, size in sizes.items() if size <= cut_above}
        dealt = sorted(hash_ for hash_, size in whole.items() if size <= cut_above)
        any_cut = len(whole) < len(sizes)
        if not dealt and not any_cut:  # each is repeated too often, so the rarest must do
            dealt = [min(whole, key=lambda hash_: (whole[hash_], hash_))]
        below = _threshold(dealt, whole, share, may_be_none=any_cut, may_be_all=len(dealt) < len(sizes))
        return cls(share, below, cut_above, tuple(sorted(whole.keys() - set(dealt))))

    def split_document(self, item: TextRecord) -> list[tuple[str, str]]:
        """Return (side, text) of what a document becomes: one part, two if it is cut, none for what was left out."""
        text = item.text
        if not text or item.side:
            return [(item.side, text)] if text else []
        if _has_more_bytes(text, self.cut_above):
            cut = _cut_point(text, self.share)
            return [(side, part) for side, part in (("train", text[:cut]), ("valid", text[cut:])) if part.strip()]
        hash_ = hash_text(text)
        return [("valid" if hash_ < self.below and hash_ not in self.trained else "train", text)]


def _threshold(dealt: list[int], groups: dict[int, int], share: float, *, may_be_none: bool, may_be_all: bool) -> int:
    """Return the hash below which documents are held out, so that `share` of the bytes dealt out is met best.

    Args:
        dealt: hashes in ascending order.
        groups: bytes of all documents of a hash.
        may_be_none, may_be_all: other documents are held out in part, or trained on.
    """
    target = share * sum(groups[hash_] for hash_ in dealt)
    taken = 0
    choices = [(target, 0)] if may_be_none else []
    for hash_ in dealt if may_be_all else dealt[:-1]:
        taken += groups[hash_]
        choices.append((abs(taken - target), hash_ + 1))
    return min(choices)[1]


def _has_more_bytes(text: str, limit: int) -> bool:
    """Return whether a text has more than `limit` bytes in UTF-8."""
    if len(text) > limit:
        return True
    return 4 * len(text) > limit and len(text.encode()) > limit


def _cut_point(text: str, share: float) -> int:
    """Return where the last `share` of a text begins: at a line's end or a blank if one is near."""
    cut = int(len(text) * (1 - share))
    near = (len(text) - cut) // 2
    for separator in ("\n", " "):
        before = text.rfind(separator, max(0, cut - near), cut) + 1
        after = text.find(separator, cut, cut + near) + 1
        if before or after:
            return before or after
    return cut


def hash_text(text: str) -> int:
    """Return a stable 64-bit number of a text's contents."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
