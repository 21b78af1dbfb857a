"""Choice of how the token embedding's gradient is reduced: as a dense matrix, or by the rows that a step uses."""

from __future__ import annotations

from megascale.core.layout import Layout
from megascale.errors import ConfigError
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.embedding_rows import fits_row_exchange


def choose_embedding_reduction(
    layout: Layout, data_parallel: DataParallel, *, obstacle: str, has_embedding: bool
) -> dict[str, str]:
    """Reduce the gradient by rows where overlap.embedding asks for it and nothing prevents it.

    Return start-up lines by name. Raises ConfigError if overlap.embedding=rows is unavailable.

    Args:
        obstacle: why this rank cannot reduce by rows, "" if it can.
        has_embedding: whether this rank's stage has the embedding.
    """
    requested = layout.config.overlap.embedding
    if requested == "dense":
        return {}
    if not obstacle and has_embedding and not data_parallel.reduce_embedding_by_rows():
        obstacle = "its rows have no bucket of their own, or the data-parallel ranks do not divide them"
    if not obstacle and has_embedding:
        return {"embedding gradient": "reduced by the rows that a step uses"}
    if obstacle and requested == "rows":
        raise ConfigError(f"overlap.embedding=rows is unavailable: {obstacle}; set --overlap.embedding=auto")
    return {}


def find_row_exchange_obstacle(
    layout: Layout, buffer: ParamAndGradBuffer, *, itemsize: int, has_graphs: bool, is_deterministic: bool
) -> str:
    """Return why the gradient cannot be reduced by rows, "" if it can.

    Args:
        buffer: flat buffer of the stage's first chunk.
        itemsize: bytes of an activation's element.
        has_graphs: whether this rank captures CUDA graphs.
        is_deterministic: whether steps repeat bit for bit.
    """
    config, grid = layout.config, layout.grid
    ranks = buffer.axes.reduce.size
    if buffer.zero != 1 or ranks == 1:
        return "it needs parallel.zero=1 and several data-parallel ranks"
    if grid.tensor > 1 or config.model.tied_embeddings:
        return "tensor parallelism divides the embedding, or the output matrix is tied to it"
    if has_graphs:
        return "CUDA graphs write the dense gradient"
    if is_deterministic and config.resilience.replay_interval != 0:
        return "replays (resilience.replay_interval) compare the dense gradient"
    if not layout.shares.is_even:
        return "replicas read different numbers of micro-batches"
    if config.overlap.embedding == "auto":
        microbatch_tokens = config.train.micro_batch * config.model.sequence_length // grid.context
        if not fits_row_exchange(
            tokens=layout.microbatches * microbatch_tokens * ranks,
            hidden=config.model.hidden,
            vocabulary=config.model.vocab,
            itemsize=itemsize,
            grad_itemsize=buffer.grad_dtype.itemsize,
        ):
            return "a step's rows have more than half of the dense gradient's bytes"
    return ""
