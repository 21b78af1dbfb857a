"""What general compressors make of the held-out text: the yardstick beside a model's bits per byte."""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

# xz -9e reads about 1.5 MB/s; of more held-out text than this the beginning stands for all.
LARGEST = 4_000_000


@dataclass(frozen=True)
class Compressed:
    """Sizes in bytes of a text, of `zlib -9` and of `xz -9e` (one stream each, over all documents joined)."""

    bytes: int
    zlib: int
    xz: int

    @property
    def zlib_bits_per_byte(self) -> float:
        """Bits of zlib output a byte of text."""
        return 8 * self.zlib / max(self.bytes, 1)

    @property
    def xz_bits_per_byte(self) -> float:
        """Bits of xz output a byte of text."""
        return 8 * self.xz / max(self.bytes, 1)


def compress(texts: Iterable[bytes], largest: int = LARGEST) -> Compressed:
    """Compress the first `largest` bytes of the concatenation of `texts`; memory stays bounded."""
    deflate = zlib.compressobj(9)
    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    size = zlib_size = xz_size = 0
    for text in texts:
        data = text[: largest - size]
        size += len(data)
        zlib_size += len(deflate.compress(data))
        xz_size += len(xz.compress(data))
        if size >= largest:
            break
    return Compressed(size, zlib_size + len(deflate.flush()), xz_size + len(xz.flush()))


def bits_per_byte(loss: float, tokens: int, text_bytes: int, lost_bytes: int = 0) -> float:
    """Return bits per byte for a mean loss in nats per token over `tokens` tokens of `text_bytes` bytes of text.

    Bytes that no token stands for are counted as they are, 8 bits each: predicting that a text is unknown is easy.
    """
    return loss * tokens / (math.log(2) * text_bytes) + 8 * lost_bytes / text_bytes
