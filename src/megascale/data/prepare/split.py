"""The rule that assigns each document of a data set to training or held-out text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from megascale.data.dataset.sources import TextRecord

# With fewer documents than this, each document is cut in two, since whole documents would make one split too small.
MIN_DOCUMENTS = 20
_HASH_RANGE = 1 << 64
# If the documents are not known in advance, documents of more than 1/8 of the held-out text are cut. With only smaller
# documents, the pseudo-random choice holds out about the requested share.
_CUT_DIVISOR = 8
_MIN_CUT_BYTES = 1 << 16  # smaller documents are never cut if the documents are not known in advance


@dataclass(frozen=True)
class Split:
    """A rule that assigns documents to training and held-out text; equal documents fall into the same split.

    Attributes:
        share: fraction of the text to hold out.
        below: threshold of document hashes; a document with a lower hash is held out.
        cut_above: size in bytes above which a document is cut in two; the last `share` of it is held out.
        trained: hashes below the threshold whose documents are trained on nevertheless. They are repeated so often that
            holding them out would exceed the share.
    """

    share: float
    below: int
    cut_above: int
    trained: tuple[int, ...] = ()

    @classmethod
    def by_share(cls, share: float, total: int) -> Split:
        """Return the rule for `total` bytes of text whose documents are unknown. It meets the share on average."""
        return cls(share, int(share * _HASH_RANGE), max(_MIN_CUT_BYTES, int(share * total) // _CUT_DIVISOR))

    @classmethod
    def by_ends(cls, share: float) -> Split:
        """Return the rule that holds out the last `share` of each document."""
        return cls(share, below=0, cut_above=0)

    @classmethod
    def for_documents(cls, documents: Iterable[tuple[int, int]], share: float) -> Split:
        """Return the rule that meets the share most closely for known documents.

        Args:
            documents: (hash, bytes) of each document.
            share: fraction of the text to hold out.
        """
        sizes: dict[int, int] = {}  # bytes of a document, by hash
        totals: dict[int, int] = {}  # bytes of all documents with the same hash
        count = 0
        for document_hash, size in documents:
            sizes[document_hash] = size
            totals[document_hash] = totals.get(document_hash, 0) + size
            count += 1
        if count < MIN_DOCUMENTS or len(sizes) < 2:
            return cls.by_ends(share)
        cut_above = int(share * sum(totals.values()))
        uncut_totals = {
            document_hash: totals[document_hash] for document_hash, size in sizes.items() if size <= cut_above
        }
        has_cut_documents = len(uncut_totals) < len(sizes)
        # Documents that are repeated too often are trained on.
        candidates = sorted(document_hash for document_hash, total in uncut_totals.items() if total <= cut_above)
        if not candidates and not has_cut_documents:  # hold out the documents with the fewest bytes in all
            candidates = [min(uncut_totals, key=lambda document_hash: (uncut_totals[document_hash], document_hash))]
        below = _find_threshold(
            candidates,
            uncut_totals,
            share,
            may_be_empty=has_cut_documents,
            may_be_all=len(candidates) < len(sizes),
        )
        return cls(share, below, cut_above, trained=tuple(sorted(uncut_totals.keys() - set(candidates))))

    def split_document(self, record: TextRecord) -> list[tuple[str, str]]:
        """Return the document as (split name, text): one pair, two pairs if it is cut, none for a skipped record."""
        text = record.text
        if not text:
            return []
        if record.split:
            return [(record.split, text)]
        if _has_more_bytes(text, self.cut_above):
            cut = _find_cut(text, self.share)
            halves = (("train", text[:cut]), ("valid", text[cut:]))
            return [(split_name, half) for split_name, half in halves if half.strip()]
        document_hash = hash_text(text)
        is_held_out = document_hash < self.below and document_hash not in self.trained
        return [("valid" if is_held_out else "train", text)]


def _find_threshold(
    candidates: list[int], totals: dict[int, int], share: float, *, may_be_empty: bool, may_be_all: bool
) -> int:
    """Return the hash below which documents are held out, so that the held-out bytes are nearest to the share.

    Args:
        candidates: hashes of documents that may be held out, in ascending order.
        totals: bytes of all documents with a hash, by hash.
        share: fraction of the candidates' bytes to hold out.
        may_be_empty: whether all candidates may be trained on, because ends of cut documents are held out.
        may_be_all: whether all candidates may be held out, because other documents are trained on.
    """
    target = share * sum(totals[document_hash] for document_hash in candidates)
    choices = [(target, 0)] if may_be_empty else []  # (distance from the target, threshold)
    held_out_bytes = 0
    held_out_candidates = candidates if may_be_all else candidates[:-1]
    for document_hash in held_out_candidates:
        held_out_bytes += totals[document_hash]
        choices.append((abs(held_out_bytes - target), document_hash + 1))
    _, threshold = min(choices)
    return threshold


def _has_more_bytes(text: str, limit: int) -> bool:
    """Return whether a text has more than `limit` bytes in UTF-8."""
    if len(text) > limit:
        return True
    # A character has at most 4 bytes, so shorter text need not be encoded.
    return 4 * len(text) > limit and len(text.encode()) > limit


def _find_cut(text: str, share: float) -> int:
    """Return the index at which about the last `share` of a text begins, after a near line end or space if any."""
    cut = int(len(text) * (1 - share))
    reach = (len(text) - cut) // 2  # largest distance by which the cut is moved
    for separator in ("\n", " "):
        before = text.rfind(separator, max(0, cut - reach), cut) + 1
        after = text.find(separator, cut, cut + reach) + 1
        if before:
            return before
        if after:
            return after
    return cut


def hash_text(text: str) -> int:
    """Return a stable 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
