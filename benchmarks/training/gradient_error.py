"""`python -m benchmarks gradients`: how far a precision's gradient is from float32's at the same weights.

Runs of the same seed drift apart and say little about a precision unless they are many and long; one gradient on the
same weights and samples has no such noise. Weights are those of a short training without float8, at one or more of its
steps. Rounding of a format shows here, and so does a wrong kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json

if TYPE_CHECKING:
    import torch

    from megascale.config import Config
    from megascale.train.engine import Engine

WARMUP = 40  # steps to the peak learning rate
# Samples of the gradient come from a step that is never trained.
SEED_DISTANCE = 10**6


@dataclass(frozen=True)
class GradientError:
    """Gradient error of a precision at one step.

    Attributes:
        step: steps trained before.
        precision: train.linear_precision, or "default" with its train.precision.
        loss: on the samples of the gradient, less float32's.
        error: 2-norm of the difference from float32's gradient as a share of it, of all parameters.
        matrices: the same of each weight matrix by name.
        projections: of each on float32's, as a share of its length squared: 1 if it is not too short on the whole.
    """

    step: int
    precision: str
    loss: float
    error: float
    matrices: dict[str, float]
    projections: dict[str, float]


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("gradients", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(gradients)


def gradients(
    context: typer.Context,
    preset: str = typer.Argument("gpt2-124m", help="A shipped model shape."),
    data: Path = typer.Option(Path("datasets/stdlib/train"), help="Token file to train on (megascale data build)."),
    precisions: list[str] = typer.Option(
        ["default", "float8", "float8_rowwise"], "--precision", help="train.linear_precision; may be given again."
    ),
    steps: list[int] = typer.Option([40, 400], min=0, help="Steps trained before; given again, each is looked at."),
    out: Path = typer.Option(Path("bench-gradients.json"), help="JSON file for the metrics."),
) -> None:
    """Error of gradients against float32's at the same weights, for each precision of the linear layers.

    One process. Any setting can be given as --section.key=value; train.precision is bfloat16 unless it is.

    Examples:

      python -m benchmarks gradients gpt2-124m --train.micro_batch=8 --train.global_batch=64

      python -m benchmarks gradients tiny --steps 0 --steps 20 --precision float8 --train.device=cpu
    """
    from rich.console import Console

    from megascale.bench.train import load_shape_config
    from megascale.data.dataset.formats import list_token_files
    from megascale.errors import ConfigError

    if not all(path.exists() for path in list_token_files(data)):
        raise ConfigError(
            f"--data={data}: there is no token file; make one with megascale data build, or name its prefix "
            "(FOLDER/train)"
        )
    defaults = ["--train.precision=bfloat16", "--train.global_batch=64", f"--data.train={data}"]
    config = load_shape_config([f"--model.preset={preset}"] + defaults + context.args)
    console, result = Console(), []
    for error in measure(config, data, precisions, sorted(set(steps)), console.print):
        result.append(error)
        _show(console, error)
    record = {"date": date.today().isoformat(), "preset": preset, "settings": context.args}
    out.write_text(strict_json.dumps(record | {"errors": [asdict(error) for error in result]}, indent=1) + "\n")
    console.print(f"metrics: {out}")


def _show(console: Any, error: GradientError) -> None:
    worst = max(error.matrices, key=error.matrices.__getitem__)
    console.print(
        f"step {error.step}  {error.precision:16} loss {error.loss:+.5f}  gradient {100 * error.error:.2f}%  matrices "
        f"{100 * min(error.matrices.values()):.1f} to {100 * error.matrices[worst]:.1f}% (median "
        f"{100 * statistics.median(error.matrices.values()):.1f}%, worst {worst})  projections "
        f"{min(error.projections.values()):.3f} to {max(error.projections.values()):.3f}",
        soft_wrap=True,
    )


def measure(
    config: Config,
    data: Path,
    precisions: list[str],
    steps: list[int],
    log: Callable[[str], None] = lambda text: None,
) -> Iterator[GradientError]:
    """Train without float8, and look at each of `steps`; two micro-batches make the gradient."""
    read = _reader(config, data)
    trained = _engine(config, config.train.precision, "default", config.train.global_batch)
    done = 0
    for upto in steps:
        loss = 0.0
        for step in range(done + 1, upto + 1):
            rate = config.lr.peak * min(1.0, step / WARMUP)
            result = trained.step(read(trained, step), step, rate)
            if step == upto:
                loss = float(result.loss)
        done = upto
        log(f"trained {upto} steps" + (f", loss {loss:.4f}" if upto else ""))
        masters = [state.master for state in trained.optimizer.states]

        def at(precision: str, linear: str, masters: list[torch.Tensor] = masters) -> tuple[float, dict[str, Any]]:
            engine = _engine(config, precision, linear, 2 * config.train.micro_batch)
            with engine.loading_weights():
                for state, master in zip(engine.optimizer.states, masters, strict=True):
                    state.master.copy_(master)
            return _gradient(engine, read(engine, SEED_DISTANCE))

        right_loss, right = at("float32", "default")
        for linear in precisions:
            own_loss, local = at(config.train.precision, linear)
            yield _compare(
                upto, linear if linear != "default" else config.train.precision, own_loss, local, right_loss, right
            )


def _compare(
    step: int,
    precision: str,
    own_loss: float,
    local: dict[str, torch.Tensor],
    right_loss: float,
    right: dict[str, torch.Tensor],
) -> GradientError:
    separate = {name: float((local[name] - right[name]).norm()) for name in right}
    length = {name: float(right[name].norm()) for name in right}
    matrices = [name for name in right if name.endswith("weight") and "norm" not in name and length[name]]
    return GradientError(
        step,
        precision,
        own_loss - right_loss,
        sum(a * a for a in separate.values()) ** 0.5 / sum(a * a for a in length.values()) ** 0.5,
        {name: separate[name] / length[name] for name in matrices},
        {name: float((local[name] * right[name]).sum()) / length[name] ** 2 for name in matrices},
    )


def _engine(config: Config, precision: str, linear: str, batch: int) -> Engine:
    from megascale.core.layout import lay_out
    from megascale.train.engine import Engine
    from megascale.train.rank_info import find_rank_info

    train = config.train.model_copy(update={"precision": precision, "linear_precision": linear, "global_batch": batch})
    config = config.model_copy(update={"train": train})
    return Engine(lay_out(config, 1), None, find_rank_info(config).device)


def _reader(config: Config, data: Path) -> Callable[[Engine, int], Any]:
    """(engine, step) -> its micro-batches: sequences from places that the step's number alone decides."""
    import numpy as np
    import torch

    from megascale.core.batch import Batch
    from megascale.data.dataset.formats import open_tokens

    stream, length = open_tokens(data).stream, config.model.sequence_length

    def read(engine: Engine, step: int) -> Any:
        micro, batch = engine.config.train.micro_batch, engine.config.train.global_batch
        locations = np.random.default_rng(step).integers(0, len(stream) - length, batch)

        def read_batch(i: int) -> Batch[torch.Tensor]:
            rows = np.stack(
                [stream[p : p + length + 1].astype(np.int64) for p in locations[i * micro : (i + 1) * micro]]
            )
            columns = torch.from_numpy(rows).t().contiguous().to(engine.device)
            return Batch(columns[:-1], columns[1:])

        return read_batch

    return read


def _gradient(engine: Engine, batches: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by logical tensor; nothing is updated."""
    import torch

    from megascale.parallel.buffers import split_extent

    pieces: dict[str, list[torch.Tensor]] = {}

    def look(step: int) -> None:
        for state in engine.optimizer.states:
            for extent in state.shard.extents:
                for piece, _, view in split_extent(extent, state.shard.grads):
                    pieces.setdefault(piece.name, []).append(view.float().flatten().clone())

    engine.before_update_hooks.append(look)
    result = engine.step(batches, SEED_DISTANCE, 0.0)
    return float(result.loss), {name: torch.cat(parts) for name, parts in pieces.items()}
