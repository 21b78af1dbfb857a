"""The rule that assigns each document of a data set to training or held-out text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from megascale.data.dataset.sources import TextRecord

# With fewer documents than this each document is cut in two: whole documents would leave one split too small.
MIN_DOCUMENTS = 20
_HASH_RANGE = 1 << 64
# In text whose documents are not known beforehand, documents larger than this part of the held-out text are cut.
# Chance then holds out about the requested share.
_UNKNOWN_PART = 8
_LEAST_CUT = 1 << 16  # bytes


@dataclass(frozen=True)
class Split:
    """A rule that assigns documents to training and held-out text; equal documents fall into the same split.

    Attributes:
        share: part of the text to hold out.
        below: a document whose hash is below this is held out.
        cut_above: a document of more bytes is cut, and its end, in the proportion of `share`, is held out.
        trained: hashes below `below` that are trained on, since their documents are repeated too often.
    """

    share: float
    below: int
    cut_above: int
    trained: tuple[int, ...] = ()

    @classmethod
    def by_share(cls, share: float, total: int) -> Split:
        """Return the rule for `total` bytes of text in unknown documents: the share holds on average."""
        return cls(share, int(share * _HASH_RANGE), max(_LEAST_CUT, int(share * total) // _UNKNOWN_PART))

    @classmethod
    def by_ends(cls, share: float) -> Split:
        """Return the rule that holds out the end of each document."""
        return cls(share, 0, 0)

    @classmethod
    def for_documents(cls, documents: Iterable[tuple[int, int]], share: float) -> Split:
        """Return the rule for known documents, (hash, bytes) each: it meets the share as nearly as they allow."""
        sizes: dict[int, int] = {}
        totals: dict[int, int] = {}
        count = 0
        for document_hash, size in documents:
            sizes[document_hash] = size
            totals[document_hash] = totals.get(document_hash, 0) + size
            count += 1
        if count < MIN_DOCUMENTS or len(sizes) < 2:
            return cls.by_ends(share)
        cut_above = int(share * sum(totals.values()))
        uncut = {document_hash: totals[document_hash] for document_hash, size in sizes.items() if size <= cut_above}
        candidates = sorted(document_hash for document_hash, size in uncut.items() if size <= cut_above)
        any_cut = len(uncut) < len(sizes)
        if not candidates and not any_cut:  # each is repeated too often, so the rarest is used
            candidates = [min(uncut, key=lambda document_hash: (uncut[document_hash], document_hash))]
        below = _find_threshold(candidates, uncut, share, may_be_empty=any_cut, may_be_all=len(candidates) < len(sizes))
        return cls(share, below, cut_above, tuple(sorted(uncut.keys() - set(candidates))))

    def split_document(self, record: TextRecord) -> list[tuple[str, str]]:
        """Return a document's parts as (split name, text): one, two if it is cut, none for a skipped record."""
        text = record.text
        if not text:
            return []
        if record.side:
            return [(record.side, text)]
        if _has_more_bytes(text, self.cut_above):
            cut = _find_cut(text, self.share)
            parts = (("train", text[:cut]), ("valid", text[cut:]))
            return [(split_name, part) for split_name, part in parts if part.strip()]
        document_hash = hash_text(text)
        is_held_out = document_hash < self.below and document_hash not in self.trained
        return [("valid" if is_held_out else "train", text)]


def _find_threshold(
    candidates: list[int], totals: dict[int, int], share: float, *, may_be_empty: bool, may_be_all: bool
) -> int:
    """Return the hash below which documents are held out so that the held-out bytes are nearest to `share`.

    Args:
        candidates: hashes in ascending order.
        totals: bytes of all documents of a hash.
        may_be_empty, may_be_all: other documents are held out in part, or trained on.
    """
    target = share * sum(totals[document_hash] for document_hash in candidates)
    choices = [(target, 0)] if may_be_empty else []
    held_out = 0
    for document_hash in candidates if may_be_all else candidates[:-1]:
        held_out += totals[document_hash]
        choices.append((abs(held_out - target), document_hash + 1))
    return min(choices)[1]


def _has_more_bytes(text: str, limit: int) -> bool:
    """Return whether a text has more than `limit` bytes in UTF-8."""
    if len(text) > limit:
        return True
    return 4 * len(text) > limit and len(text.encode()) > limit


def _find_cut(text: str, share: float) -> int:
    """Return the index at which the last `share` of a text begins, moved to a near line end or space."""
    cut = int(len(text) * (1 - share))
    reach = (len(text) - cut) // 2
    for separator in ("\n", " "):
        before = text.rfind(separator, max(0, cut - reach), cut) + 1
        after = text.find(separator, cut, cut + reach) + 1
        if before or after:
            return before or after
    return cut


def hash_text(text: str) -> int:
    """Return a stable 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
