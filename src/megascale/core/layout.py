"""From a configuration and a number of ranks to a layout that runs, or an error that names what would."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, isqrt

from megascale.config import Config, ModelConfig, ParallelConfig
from megascale.core.grid import Grid
from megascale.core.layers import ChunkLayers, chunk_layers
from megascale.core.schedule import Schedule
from megascale.core.schedule_registry import SCHEDULES, checked_schedule, made_schedule
from megascale.errors import FitError

# Forward passes in a step's schedule, over all stages: far above the thousands that published runs have.
MOST_FORWARDS = 400_000


@dataclass(frozen=True)
class Layout:
    """A configuration laid over a world.

    Attributes:
        grid: sizes of the axes.
        microbatches: micro-batches a data-parallel rank runs in a step.
        layers: layers of each model chunk, in model order; chunk g lies on stage g mod grid.pipeline.
    """

    config: Config
    grid: Grid
    microbatches: int
    layers: tuple[ChunkLayers, ...]

    def schedule(self) -> Schedule:
        """The pipeline schedule of a step, proven by the checker: what runs. ScheduleError if it hangs."""
        return checked_schedule(*self._schedule())

    def unchecked_schedule(self) -> Schedule:
        """The same without its proof, for sizing layouts that nobody runs."""
        return made_schedule(*self._schedule())

    def _schedule(self) -> tuple[str, int, int, int, bool, int | None, bool]:
        parallel = self.config.parallel
        return (
            parallel.schedule,
            parallel.pipeline,
            parallel.virtual_stages,
            self.microbatches,
            parallel.zero == 2 and self.grid.data > 1,
            parallel.micro_batch_group_size,
            self.config.overlap.pipeline,
        )

    def chunks_of(self, stage: int) -> list[ChunkLayers]:
        """Layers of each chunk of a stage, chunk 0 first."""
        return list(self.layers[stage :: self.grid.pipeline])


def lay_out(config: Config, world: int) -> Layout:
    """Lay `config` over `world` ranks. FitError, one line a fault, naming key, value and the nearest that fit;
    ConfigError for a schedule that nobody has registered."""
    parallel = config.parallel
    SCHEDULES[parallel.schedule]
    faults = _tensor_faults(config.model, parallel.tensor)
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        faults += _one_stage_faults(parallel)
    if parallel.micro_batch_group_size is not None and parallel.virtual_stages == 1:
        faults.append(
            f"parallel.micro_batch_group_size={parallel.micro_batch_group_size} orders the chunks of "
            "a stage, and each has one; leave it out "
            "or set --parallel.virtual_stages=2 or more"
        )
    elif parallel.micro_batch_group_size is not None and parallel.micro_batch_group_size < parallel.pipeline:
        faults.append(
            f"parallel.micro_batch_group_size={parallel.micro_batch_group_size} is less than "
            f"parallel.pipeline={parallel.pipeline}: a round "
            f"shorter than the pipeline deadlocks; set --parallel.micro_batch_group_size={parallel.pipeline} or more"
        )
    grid = layers = microbatches = None
    try:
        layers = chunk_layers(config.model, parallel)
    except FitError as error:
        faults.append(str(error))
    try:
        grid = Grid.of_world(world, parallel.tensor, parallel.pipeline, parallel.data, parallel.gpus_per_host)
        microbatches = config.count_microbatches(grid.data)
    except FitError as error:
        faults.append(str(error))
    if microbatches is not None and layers is not None:
        faults += _schedule_faults(config, grid.data if grid is not None else 1, microbatches)
    if faults or grid is None or layers is None or microbatches is None:
        raise FitError("\n".join(faults))
    return Layout(config, grid, microbatches, tuple(layers))


def _schedule_faults(config: Config, data: int, microbatches: int) -> list[str]:
    """A step whose list of actions alone would take minutes to make and gigabytes to hold."""
    parallel, train = config.parallel, config.train
    forwards = parallel.pipeline * parallel.virtual_stages * microbatches
    if forwards <= MOST_FORWARDS:
        return []
    chunks = f"parallel.pipeline={parallel.pipeline} x parallel.virtual_stages={parallel.virtual_stages}"
    fitting = max(1, MOST_FORWARDS // (parallel.pipeline * parallel.virtual_stages)) * train.micro_batch * data
    return [
        f"train.global_batch={train.global_batch} is {microbatches:,} micro-batches of train.micro_batch="
        f"{train.micro_batch} on each of {data} data-parallel ranks, with {chunks} {forwards:,} forward passes in a "
        f"step's schedule, which holds {MOST_FORWARDS:,} at most; lower train.global_batch to {fitting} or less, or "
        "raise train.micro_batch"
    ]


def _one_stage_faults(parallel: ParallelConfig) -> list[str]:
    """What several chunks on a single stage, which are there for long rounds, do not go with."""
    chunks = f"parallel.virtual_stages={parallel.virtual_stages} with parallel.pipeline=1"
    faults = []
    if parallel.micro_batch_group_size is None:
        faults.append(
            f"{chunks} gains nothing in rounds of one micro-batch; set --parallel.micro_batch_group_size to "
            "the micro-batches of "
            "a step, or --parallel.virtual_stages=1"
        )
    if parallel.zero == 2:
        faults.append(
            f"{chunks} does not go with parallel.zero=2, which reduces gradients after every micro-batch and so has "
            "nothing to hide in long rounds; set --parallel.zero=1, or --parallel.virtual_stages=1"
        )
    return faults


def _tensor_faults(model: ModelConfig, tensor: int) -> list[str]:
    """What tensor parallelism cannot cut evenly, a sentence each."""
    sizes = {
        "model.heads": model.heads,
        **({"model.kv_heads": model.kv} if model.kv != model.heads else {}),
        "model.ffn_hidden": model.ffn,
        "model.sequence_length": model.sequence_length,
    }
    faults = []
    common = gcd(*sizes.values(), model.padded_vocab)
    ranks = " or ".join(str(n) for n in near_divisors(common, tensor))
    for key, value in sizes.items():
        if value % tensor:
            advice = f"use --parallel.tensor={ranks} (fits all sizes)"
            if "heads" not in key:
                # Other numbers of heads rarely divide the width, so only the layout is advised there.
                advice += f" or --{key}={' or '.join(str(n) for n in near_multiples(value, tensor))}"
            faults.append(f"{key}={value} is not divisible by parallel.tensor={tensor}; {advice}")
    if model.padded_vocab % tensor:
        multiple = model.vocab_multiple * tensor // gcd(model.vocab_multiple, tensor)
        faults.append(
            f"the padded vocabulary {model.padded_vocab} (model.vocab_size={model.vocab} rounded up to a multiple of "
            f"model.vocab_multiple={model.vocab_multiple}) is not divisible by parallel.tensor={tensor}; "
            f"use --model.vocab_multiple={multiple} or --parallel.tensor={ranks}"
        )
    return faults


def near_divisors(value: int, wanted: int) -> list[int]:
    """The divisors of `value` next to `wanted`, below and above."""
    small = [n for n in range(1, isqrt(value) + 1) if value % n == 0]
    divisors = sorted({*small, *(value // n for n in small)})
    below = [n for n in divisors if n <= wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return below + above


def near_multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` next to `value`, below (if positive) and above."""
    below = value // of * of
    return [n for n in (below, below + of) if n > 0]
