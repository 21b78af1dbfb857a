"""What a pickle of strangers may take before anything of it is loaded: a dozen bytes can ask for gigabytes.

CPython's unpickler makes its table of remembered objects, and byte arrays, as large as the pickle says. So the
operations are walked through first, with nothing made of them.
"""

from __future__ import annotations

import pickletools


def check_pickle(data: bytes) -> None:
    """ValueError for a pickle whose operations ask for more than `data` is long, or that is cut or none."""
    try:
        for operation, argument, _ in pickletools.genops(data):
            place = int(argument) if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument is not None else 0
            if not 0 <= place <= len(data):
                raise ValueError(f"it remembers {place:,} objects in {len(data):,} bytes")
    except ValueError:
        raise
    except Exception as error:  # genops fails in several ways at what is no pickle
        raise ValueError(f"it is no pickle: {error}") from None
