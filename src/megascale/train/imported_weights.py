"""The weights of an imported model, with which a run begins that has no state of its own."""

from __future__ import annotations

from collections.abc import Sequence

from megascale import checkpoint
from megascale.errors import DataError
from megascale.train.resume import Origin


def load_imported(folder: str, weights: Sequence[checkpoint.TensorShard], origin: Origin) -> None:
    """Fill this process's weights from step 0 of the folder that checkpoint.imported names; collective.

    Raises DataError if the imported weights are gone or of another model than the configuration's: the run would begin
    with random weights.
    """
    try:
        checkpoint.load(folder, weights, step=0, accept=origin.check_imported, complete=True)
    except DataError as error:
        raise DataError(
            f"this start has no state to go on from, and the imported weights of checkpoint.imported={folder} cannot "
            f"take its place: {error}. Import the model again (megascale convert import), or remove "
            "checkpoint.imported from the configuration to begin with random weights"
        ) from None
    origin.notes.append(f"this run begins with the imported weights of {folder}")
