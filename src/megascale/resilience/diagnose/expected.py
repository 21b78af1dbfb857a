"""What this kind of hardware usually reaches, learned from the machines themselves, in one JSON file.

Of each check the last rates of machines that passed are kept; a rate well under their median fails. Digests of bits
are kept by hardware and torch version: another machine of the kind must compute the same.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale.errors import DataError
from megascale.resilience.diagnose.check import SelfCheck

KEPT = 50  # rates of a check
LEAST_RATES = 3  # rates before any fails
# Least part of the median that passes. CPUs are shared with whatever else runs (on one machine also with the other
# nodes' checks), so only a collapse tells; devices are this node's own.
TOLERANCE = {"cuda": 0.8, "cpu": 0.1}


def default_file() -> Path:
    """Where expectations lie by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "megascale" / "expected.json"


def hardware() -> str:
    """The kind of this machine: device and number, or processor and cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


@dataclass
class Expected:
    """Rates and digests by hardware: {hardware: {check: [rates]}} and {hardware, torch: {check: digest}}."""

    kind: str
    version: str
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path, kind: str, version: str) -> Expected:
        """Read `file`, which need not exist. DataError if it is something else."""
        try:
            record: dict[str, Any] = json.loads(file.read_text())
            rates = {h: {c: [float(r) for r in v] for c, v in checks.items()} for h, checks in record["rates"].items()}
            digests = {h: {c: str(d) for c, d in checks.items()} for h, checks in record["digests"].items()}
            return cls(kind, version, rates, digests)
        except FileNotFoundError:
            return cls(kind, version)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise DataError(
                f"{file} does not hold what `megascale diagnose` writes ({error}); move it away to learn anew"
            ) from None

    def save(self, file: Path) -> None:
        """Write completely or not at all; several nodes of a machine may do so at once, the last one stays."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"rates": self.rates, "digests": self.digests}, indent=1))
        os.replace(temporary, file)

    def judge(self, check: SelfCheck) -> SelfCheck:
        """`check` with the rate that is expected, failed if it is under it or its bits differ."""
        if check.result != "passed":
            return check
        known = self.digests.get(self._bits(), {}).get(check.name)
        if check.digest and known and known != check.digest:
            text = f"bits {check.digest} differ from {known}, which this hardware computed before; {check.details}"
            return replace(check, result="failed", details=text)
        rates = self.rates.get(self.kind, {}).get(_family(check.name), [])
        if check.measured is None or len(rates) < LEAST_RATES:
            return check
        least = TOLERANCE["cuda" if "cuda" in check.name else "cpu"] * statistics.median(rates)
        if check.measured >= least:
            return replace(check, expected=least)
        text = f"{check.measured:.3g} {check.unit} where machines of this kind reach {statistics.median(rates):.3g}"
        return replace(check, result="failed", expected=least, details=f"{text}; {check.details}")

    def learn(self, check: SelfCheck) -> None:
        """Remember what a check that passed reached."""
        if check.result != "passed":
            return
        if check.measured is not None:
            rates = self.rates.setdefault(self.kind, {}).setdefault(_family(check.name), [])
            rates.append(round(check.measured, 6))
            del rates[:-KEPT]
        if check.digest:
            self.digests.setdefault(self._bits(), {}).setdefault(check.name, check.digest)

    def _bits(self) -> str:
        return f"{self.kind}, torch {self.version}"


def _family(name: str) -> str:
    """The check without the number of the device: equal devices have equal expectations."""
    return " ".join("cuda" if word.startswith("cuda:") else word for word in name.split())
