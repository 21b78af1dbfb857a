"""The result of a self-check, and the expected rates and digests of a kind of hardware.

Expectations are learned from machines that passed, and stored in one JSON file. The file has the last rates per check;
a rate far below their median fails. Digests of bits are stored per hardware and torch version, since all machines of a
kind must compute the same bits.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megascale.core.atomic_files import write_atomically
from megascale.errors import DataError

Result = Literal["passed", "failed", "absent"]
STORED_RATES = 50  # last rates that are kept per check
_ERROR_CHARACTERS = 300  # of an exception's message
MIN_RATES = 3  # learned rates before a check can fail by its rate
# Fraction of the median rate from which a rate passes. Other processes, such as the self-checks of other nodes on the
# machine, use the same CPU, so only a collapse counts. GPUs belong to one node.
TOLERANCE = {"cuda": 0.8, "cpu": 0.1}


@dataclass(frozen=True)
class SelfCheck:
    """The result of one check.

    Attributes:
        name: such as "gemm rate cuda:0".
        result: passed, failed, or absent if the machine lacks the hardware.
        measured: a rate in `unit`, None if the check measures none.
        unit: such as "TFLOP/s" or "GB/s".
        expected: lowest rate that passes, None before enough rates are learned.
        digest: digest of bits that must be equal on all machines of the kind, "" if there are none.
        details: description of the test, or the reason of a failure.
    """

    name: str
    result: Result
    measured: float | None = None
    unit: str = ""
    expected: float | None = None
    digest: str = ""
    details: str = ""

    @property
    def has_passed(self) -> bool:
        """True unless the check failed; absent hardware does not fail."""
        return self.result != "failed"


def make_failed_check(name: str, reason: str) -> SelfCheck:
    return SelfCheck(name, "failed", details=reason)


def make_absent_check(name: str, reason: str) -> SelfCheck:
    """Return a check whose hardware is absent."""
    return SelfCheck(name, "absent", details=reason)


def run_guarded(name: str, check: Callable[[], Iterable[SelfCheck]]) -> list[SelfCheck]:
    """Return a check's results. An exception is a failure, since checks of healthy machines raise none."""
    try:
        return list(check())
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return [make_failed_check(name, f"{type(error).__name__}: {lines[0][:_ERROR_CHARACTERS]}")]


def get_default_file() -> Path:
    """Return the default file of expectations."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "megascale" / "expected.json"


def describe_hardware() -> str:
    """Return the kind of this machine: number and model of its GPUs, or model and cores of its CPU."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            model = names[0]
    return f"{model}, {os.cpu_count()} cores"


@dataclass
class Expected:
    """Expectations for a kind of hardware.

    Attributes:
        kind: the kind of hardware, as `describe_hardware` returns it.
        version: torch version.
        rates: kind of hardware -> name of the check -> last rates.
        digests: kind of hardware and torch version -> name of the check -> digest.
    """

    kind: str
    version: str
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path, kind: str, version: str) -> Expected:
        """Read a file of expectations, which need not exist. Raises DataError if it is malformed."""
        try:
            record: dict[str, Any] = json.loads(file.read_text())
            rates: dict[str, dict[str, list[float]]] = {}
            for stored_kind, checks in record["rates"].items():
                rates[stored_kind] = {name: list(map(float, values)) for name, values in checks.items()}
            digests = {}
            for stored_kind, checks in record["digests"].items():
                digests[stored_kind] = {name: str(digest) for name, digest in checks.items()}
            return cls(kind, version, rates, digests)
        except FileNotFoundError:
            return cls(kind, version)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise DataError(
                f"{file} was not written by `megascale diagnose` ({error}); move it away to learn expectations again"
            ) from None

    def save(self, file: Path) -> None:
        """Write the file atomically. If several nodes of a machine write it at the same time, the last write counts."""
        write_atomically(file, json.dumps({"rates": self.rates, "digests": self.digests}, indent=1))

    def judge(self, check: SelfCheck) -> SelfCheck:
        """Return `check` with the expected rate. It has failed if its rate is lower or its bits differ."""
        if check.result != "passed":
            return check
        digest = self.digests.get(self._digest_key(), {}).get(check.name)
        if check.digest and digest and digest != check.digest:
            text = f"bits {check.digest} differ from {digest}, which this hardware computed before; {check.details}"
            return replace(check, result="failed", details=text)
        rates = self.rates.get(self.kind, {}).get(_rate_key(check.name), [])
        if check.measured is None or len(rates) < MIN_RATES:
            return check
        median = statistics.median(rates)
        device = "cuda" if "cuda" in check.name else "cpu"
        min_rate = TOLERANCE[device] * median
        if check.measured >= min_rate:
            return replace(check, expected=min_rate)
        text = f"{check.measured:.3g} {check.unit} where machines of this kind reach {median:.3g}; {check.details}"
        return replace(check, result="failed", expected=min_rate, details=text)

    def learn(self, check: SelfCheck) -> None:
        """Add the rate and digest of a check that passed."""
        if check.result != "passed":
            return
        if check.measured is not None:
            rates = self.rates.setdefault(self.kind, {}).setdefault(_rate_key(check.name), [])
            rates.append(round(check.measured, 6))
            del rates[:-STORED_RATES]
        if check.digest:
            self.digests.setdefault(self._digest_key(), {}).setdefault(check.name, check.digest)

    def _digest_key(self) -> str:
        """Return the key of `digests` for this machine: other torch versions may compute other bits."""
        return f"{self.kind}, torch {self.version}"


def _rate_key(name: str) -> str:
    """Return the name of a check without GPU numbers, since equal GPUs have equal expectations."""
    return " ".join("cuda" if word.startswith("cuda:") else word for word in name.split())
