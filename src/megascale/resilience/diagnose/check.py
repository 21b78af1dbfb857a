"""The result of one self-check, and which checks there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Result = Literal["passed", "failed", "absent"]


@dataclass(frozen=True)
class SelfCheck:
    """What one check found.

    Attributes:
        name: such as "gemm rate cuda:0".
        result: passed, failed, or absent where the hardware is not there.
        measured: a rate in `unit`, None where there is nothing to count.
        unit: such as "TFLOP/s" or "GB/s".
        expected: least rate that passes, None while nothing was learned of this hardware.
        digest: of bits that must be equal on all machines of the kind, "" where there are none.
        details: a sentence: what was done, or why it failed.
    """

    name: str
    result: Result
    measured: float | None = None
    unit: str = ""
    expected: float | None = None
    digest: str = ""
    details: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the node; absent hardware does not."""
        return self.result != "failed"


def absent(name: str, why: str) -> SelfCheck:
    """The hardware is not there."""
    return SelfCheck(name, "absent", details=why)


def run_guarded(name: str, check: Callable[[], Iterable[SelfCheck]]) -> list[SelfCheck]:
    """The check's results; what it raises is a failure, as a healthy machine raises nothing."""
    try:
        return list(check())
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return [SelfCheck(name, "failed", details=f"{type(error).__name__}: {first[:300]}")]
