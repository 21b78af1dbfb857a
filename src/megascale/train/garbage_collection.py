"""Python's garbage, collected on all ranks after the same step.

Left alone, each rank collects when its own counters say so: a rank that stops for 50 ms stops all that wait for it,
and each at another step. Here nothing is collected in between, what start-up made is never looked through again, and
the collection runs while the device still works on the step before.
"""

from __future__ import annotations

import gc


class Garbage:
    """Use around the steps of a run.

    Args:
        interval: steps between collections; 0 leaves it to Python.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._was_enabled = gc.isenabled()
        self._frozen = False

    def due(self, step: int) -> bool:
        """Whether `after` will collect."""
        return bool(self.interval) and (not self._frozen or step % self.interval == 0)

    def collect(self, step: int) -> None:
        """Step number `step` has been begun on the device."""
        if not self.interval:
            return
        if not self._frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._frozen = True
        elif step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """As it was before."""
        if self._frozen:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
            self._frozen = False
