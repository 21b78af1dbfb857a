"""Layout of a configuration over a number of ranks. Errors name the nearest values that fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, isqrt

from megascale.config import Config, ModelConfig, ParallelConfig
from megascale.config.parts import ATTENTIONS, LINEAR_PRECISIONS
from megascale.core.adapters import list_adapter_faults
from megascale.core.batch_shares import BatchShares
from megascale.core.chunk_map import ChunkMap
from megascale.core.grid import Grid
from megascale.core.head_exchange import list_gather_kernels, share_heads
from megascale.core.inventory import has_experts, resolve_layers
from megascale.core.layers import ChunkLayers, assign_layers
from megascale.core.memory import MemoryEstimate
from megascale.core.parameter_counts import count_stage_units
from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.rank_memory import estimate_rank_memory
from megascale.core.replay_interval import list_unsupported_settings
from megascale.core.schedule import Schedule
from megascale.core.schedule_registry import SCHEDULES, build_checked_schedule, build_schedule, chunk_map_of
from megascale.core.unit_slots import CHUNK_SLOTS, assign_chunk_slots, has_chunk_slots
from megascale.errors import FitError

# Most forward passes in a step's schedule over all stages. Published runs have some thousands; lists of more actions
# than this take minutes to build and gigabytes to store.
MAX_FORWARDS = 400_000


@dataclass(frozen=True)
class Layout:
    """Sizes that follow from a configuration and a number of ranks.

    Training, planner and preflight read them here instead of computing them again from the configuration.

    Attributes:
        microbatches: micro-batches per data-parallel rank and step. A rank that reads fewer samples fills up with
            micro-batches without loss weight.
        layers: layers of each model chunk, in model order; `chunk_map` has the chunks' stages.
    """

    config: Config
    grid: Grid
    microbatches: int
    layers: tuple[ChunkLayers, ...]

    @property
    def chunk_map(self) -> ChunkMap:
        """Stage of each model chunk, and its index on the stage."""
        return chunk_map_of(self.config.parallel)

    def schedule(self) -> Schedule:
        """Return the pipeline schedule of a step, proven by the checker. Raises ScheduleError if it deadlocks."""
        return build_checked_schedule(*self._schedule_arguments())

    def unchecked_schedule(self) -> Schedule:
        """Return the schedule without its proof, for estimates of layouts that are not run."""
        return build_schedule(*self._schedule_arguments())

    def _schedule_arguments(self) -> tuple[str, int, int, int, bool, int | None, bool]:
        """Return the arguments of `build_schedule`, in its order."""
        parallel = self.config.parallel
        return (
            parallel.schedule,
            parallel.pipeline,
            parallel.virtual_stages,
            self.microbatches,
            parallel.zero >= 2 and self.grid.shards > 1,
            parallel.micro_batch_group_size,
            self.config.overlap.pipeline,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.train.global_batch * self.config.model.sequence_length

    @property
    def shares(self) -> BatchShares:
        """Micro-batches of the global batch that each replica reads."""
        return BatchShares(self.config.train.global_batch // self.config.train.micro_batch, self.grid.replicas)

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step on each data-parallel rank, if all ranks read the same number."""
        return self.config.train.global_batch // self.grid.replicas

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Shape of an activation between chunks: [sequence / context / tensor, micro_batch, hidden]."""
        model = self.config.model
        rows = model.sequence_length // (self.grid.context * self.grid.tensor)
        return rows, self.config.train.micro_batch, model.hidden

    @property
    def bucket_elements(self) -> int | None:
        """Elements of a data-parallel bucket; None with one data-parallel rank, which has nothing to reduce."""
        if self.grid.shards > 1:
            return self.config.parallel.bucket_elements
        return None

    def find_table_part(self, stage: int) -> int | None:
        """Return the elements of a part if ZeRO-2 divides the gradients of the stage's tables by rows, else None."""
        config = self.config
        if config.parallel.zero != 2 or config.train.lora is not None:
            return None
        return count_stage_units(config.model, config.parallel, stage).find_table_part(self.bucket_elements)

    def chunk_slots(self, stage: int) -> tuple[int, ...] | None:
        """Return the slot of each chunk of a stage if ZeRO-3 gathers whole chunks, else None."""
        if self.config.parallel.zero < 3 or not has_chunk_slots(self.config.parallel.virtual_stages):
            return None
        return assign_chunk_slots(self.schedule(), stage)

    def stage_memory(
        self, stage: int, limit: float | None = None, measures_launches: bool = False
    ) -> tuple[MemoryEstimate, str]:
        """Return the peak memory of a GPU's rank of `stage`, and why its chunks are not CUDA graphs ("" if they are).

        Args:
            limit: bytes that the rank may use, if known. kernels.graphs=auto uses graphs only if they fit.
            measures_launches: as for `explain_no_graphs`.
        """
        return estimate_rank_memory(
            self.config,
            self.grid,
            schedule=self.schedule(),
            stage=stage,
            available_bytes=limit,
            measures_launches=measures_launches,
        )

    def stage_layers(self, stage: int) -> list[ChunkLayers]:
        """Return the layers of each chunk of a stage, chunk 0 first."""
        return [self.layers[position] for position in self.chunk_map.stage_chunks(stage)]


def lay_out(config: Config, world: int) -> Layout:
    """Lay out `config` over `world` ranks.

    Raises FitError with one line per fault, which has the key, the value and the nearest values that fit. Raises
    ConfigError if the schedule is not registered.
    """
    parallel = config.parallel
    SCHEDULES[parallel.schedule]  # raises ConfigError for an unknown name
    faults = _tensor_faults(config.model, parallel.tensor)
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        faults += _one_stage_faults(parallel)
    faults += _expert_faults(config)
    if parallel.context > 1 and any(getattr(layer.mixer, "has_sinks", False) for layer in resolve_layers(config.model)):
        faults.append(
            f"parallel.context={parallel.context} with model.attention_sinks=true: the ranks of a sequence do not "
            "divide the sinks; set --parallel.context=1"
        )
    faults += _recompute_faults(config)
    if parallel.context > 1:
        faults += _context_faults(config)
    faults += _kept_layers_faults(parallel)
    faults += _group_size_faults(parallel)
    # Each of these is None if it cannot be made; `faults` then has the reason.
    grid: Grid | None = None
    layers: list[ChunkLayers] | None = None
    microbatches: int | None = None
    try:
        layers = assign_layers(config.model, parallel)
    except FitError as error:
        faults.append(str(error))
    try:
        grid = Grid.from_config(parallel, world)
        microbatches = config.count_microbatches(grid.replicas)
    except FitError as error:
        faults.append(str(error))
    if microbatches is not None and layers is not None:
        faults += _schedule_faults(config, 1 if grid is None else grid.replicas, microbatches)
    faults += list_adapter_faults(config, layers)
    if grid is not None:
        faults += _replay_faults(config, grid)
    if faults or grid is None or layers is None or microbatches is None:
        raise FitError("\n".join(faults))
    return Layout(config, grid, microbatches, tuple(layers))


def _recompute_faults(config: Config) -> list[str]:
    """Return the faults of recomputation and offloaded activations."""
    parallel = config.parallel
    faults = []
    if parallel.recompute in ("mlp", "attention") and not BLOCK_PARTS[config.model.block].can_split:
        faults.append(
            f"parallel.recompute={parallel.recompute} with model.block={config.model.block}, whose halves are computed "
            "together; set --parallel.recompute=selective or full, or --model.block=serial"
        )
    if parallel.offload_activations and parallel.recompute != "full":
        faults.append(
            f"parallel.offload_activations=true with parallel.recompute={parallel.recompute}: it keeps the inputs of "
            "layers that are recomputed as a whole; set --parallel.recompute=full"
        )
    return faults


def _kept_layers_faults(parallel: ParallelConfig) -> list[str]:
    """Return the fault of parallel.zero3_keep_layers, if it is set and the slots are those of whole chunks."""
    if not parallel.zero3_keep_layers or not has_chunk_slots(parallel.virtual_stages):
        return []
    return [
        f"parallel.zero3_keep_layers={parallel.zero3_keep_layers} with "
        f"parallel.virtual_stages={parallel.virtual_stages}: slots of whole chunks keep no single layers; "
        f"set --parallel.virtual_stages={CHUNK_SLOTS} or less, or leave it out"
    ]


def _group_size_faults(parallel: ParallelConfig) -> list[str]:
    """Return the fault of parallel.micro_batch_group_size, if it is set and does not fit the pipeline."""
    group_size = parallel.micro_batch_group_size
    if group_size is None:
        return []
    if parallel.virtual_stages == 1:
        return [
            f"parallel.micro_batch_group_size={group_size} orders the chunks of "
            "a stage, but each stage has one chunk; leave it out or set --parallel.virtual_stages=2 or more"
        ]
    if group_size < parallel.pipeline:
        return [
            f"parallel.micro_batch_group_size={group_size} is less than "
            f"parallel.pipeline={parallel.pipeline}: a group smaller than the pipeline deadlocks; "
            f"set --parallel.micro_batch_group_size={parallel.pipeline} or more"
        ]
    return []


def _schedule_faults(config: Config, replicas: int, microbatches: int) -> list[str]:
    """Return the fault of a step with more than MAX_FORWARDS forward passes."""
    parallel, train = config.parallel, config.train
    forwards = parallel.pipeline * parallel.virtual_stages * microbatches
    if forwards <= MAX_FORWARDS:
        return []
    chunks = f"parallel.pipeline={parallel.pipeline} x parallel.virtual_stages={parallel.virtual_stages}"
    max_microbatches = max(1, MAX_FORWARDS // (parallel.pipeline * parallel.virtual_stages))
    max_batch = max_microbatches * train.micro_batch * replicas
    return [
        f"train.global_batch={train.global_batch} is {microbatches:,} micro-batches of train.micro_batch="
        f"{train.micro_batch} on each of {replicas} data-parallel ranks. With {chunks} that is {forwards:,} forward "
        f"passes in a step's schedule, and the maximum is {MAX_FORWARDS:,}; lower train.global_batch to {max_batch} or "
        "less, or raise train.micro_batch"
    ]


def _replay_faults(config: Config, grid: Grid) -> list[str]:
    """Return the faults of resilience.replay_interval, with which other replicas replay micro-batches of a step."""
    interval = config.resilience.replay_interval
    if interval in ("auto", 0):
        return []
    key = f"resilience.replay_interval={interval}"
    faults = []
    if grid.replicas < 2:
        faults.append(
            f"{key} compares data-parallel replicas, and there is {grid.replicas}; use more ranks or set "
            "--resilience.replay_interval=0"
        )
    for setting, remedy in list_unsupported_settings(config, grid):
        faults.append(f"{key} does not support {setting} yet; set {remedy} or --resilience.replay_interval=0")
    if not config.requested_determinism:
        faults.append(
            f"{key} compares bits, which kernels.deterministic=false does not keep equal; set "
            "--kernels.deterministic=true or --resilience.replay_interval=0"
        )
    return faults


def _expert_faults(config: Config) -> list[str]:
    """Return the faults of experts, and of settings for experts in a model without any."""
    if not has_experts(config.model):
        return _absent_expert_faults(config.parallel)
    faults = _expert_division_faults(config)
    settings, tensor = config.model.expert_settings, config.parallel.tensor
    if settings.shared_width % tensor:
        multiples = " or ".join(str(n) for n in nearest_multiples(settings.shared_width, tensor))
        faults.append(
            f"model.experts.shared_width={settings.shared_width} is not divisible by parallel.tensor={tensor}; use "
            f"--model.experts.shared_width={multiples}"
        )
    faults += _expert_precision_faults(config)
    if config.train.lora is not None and settings.bias_rate:
        faults.append(
            f"model.experts.bias_rate={settings.bias_rate} with train.lora: adapters leave the model as it is, and "
            "the routers' biases belong to it; train the whole model, or one without model.experts.bias_rate"
        )
    return faults


def _expert_precision_faults(config: Config) -> list[str]:
    """Return the faults of linear precisions in a model with experts."""
    name = config.train.linear_precision
    if not LINEAR_PRECISIONS[name].has_expert_gemms:
        names = [precision for precision, facts in LINEAR_PRECISIONS.items() if facts.has_expert_gemms]
        return [
            f"train.linear_precision={name} with model.mlp=experts: experts have no GEMMs in this precision; set "
            f"--train.linear_precision to one of {', '.join(names)}"
        ]
    if config.parallel.gather_precision == "float8":
        return [
            "parallel.gather_precision=float8 with model.mlp=experts: matrices of experts are gathered in "
            "train.precision; set --parallel.gather_precision=auto or default"
        ]
    return []


def _absent_expert_faults(parallel: ParallelConfig) -> list[str]:
    """Return the fault of settings that divide experts, for a model without experts."""
    if parallel.expert == 1 and parallel.experts_over == "tensor":
        return []
    if parallel.experts_over == "context" and parallel.expert == 1:
        return [
            "parallel.experts_over=context divides experts, and the model has none; set --parallel.experts_over=tensor"
        ]
    return [
        f"parallel.expert={parallel.expert} with parallel.experts_over={parallel.experts_over} divides experts, "
        "and the model has none; leave both out, and use parallel.data for more samples at once"
    ]


def _expert_division_faults(config: Config) -> list[str]:
    """Return the faults of the ranks that divide a model's experts."""
    parallel = config.parallel
    tensor = parallel.tensor
    settings = config.model.expert_settings
    faults = []
    if parallel.experts_over == "data" and parallel.expert == 1:
        faults.append(
            "parallel.experts_over=data with parallel.expert=1 divides nothing; set --parallel.expert to the number "
            f"of ranks that divide the experts, a divisor of model.experts.number={settings.number}"
        )
    if parallel.experts_over == "context" and parallel.context == 1:
        faults.append(
            "parallel.experts_over=context with parallel.context=1 divides nothing; set --parallel.context=2 or more, "
            "or --parallel.experts_over=tensor"
        )
    if parallel.experts_over != "data" and parallel.expert > 1:
        faults.append(
            f"parallel.expert={parallel.expert} with parallel.experts_over={parallel.experts_over}; set "
            "--parallel.experts_over=data, or --parallel.expert=1"
        )
    # The setting whose ranks divide the experts, next to parallel.tensor.
    key = "parallel.context" if parallel.experts_over == "context" else "parallel.expert"
    described_ranks = f"{key}={parallel.expert_ranks}"
    if settings.number % (tensor * parallel.expert_ranks):
        if parallel.expert_ranks == 1:
            ranks = " or ".join(str(n) for n in nearest_divisors(settings.number, tensor))
            faults.append(
                f"model.experts.number={settings.number} is not divisible by parallel.tensor={tensor}, whose ranks "
                f"hold the experts; use --parallel.tensor={ranks}"
            )
        else:
            faults.append(
                f"model.experts.number={settings.number} is not divisible by parallel.tensor={tensor} x "
                f"{described_ranks}, whose ranks hold the experts; choose a product that divides it"
            )
    if parallel.expert_ranks > 1 and parallel.replicate > 1:
        faults.append(
            f"{described_ranks} with parallel.replicate={parallel.replicate} is not supported; set "
            "--parallel.replicate=1"
        )
    if parallel.expert_ranks > 1 and config.train.lora is not None:
        faults.append(
            f"{described_ranks} with train.lora: adapters leave experts as they are; set "
            "--parallel.experts_over=tensor --parallel.expert=1 and use parallel.data"
        )
    return faults


def _context_faults(config: Config) -> list[str]:
    """Return the faults of a layout with a context axis."""
    model = config.model
    tensor = config.parallel.tensor
    context = config.parallel.context
    faults = []
    rank_count = tensor * context  # ranks that divide the sequence
    if model.sequence_length % rank_count:
        multiples = " or ".join(str(n) for n in nearest_multiples(model.sequence_length, rank_count))
        tensor_factor = f" x parallel.tensor={tensor}" if tensor > 1 else ""
        faults.append(
            f"model.sequence_length={model.sequence_length} is not divisible by "
            f"parallel.context={context}{tensor_factor}; use --model.sequence_length={multiples}"
        )
    mixers = dict.fromkeys(layer.mixer for layer in resolve_layers(model))
    for name in sorted({mixer.name for mixer in mixers if not ATTENTIONS[mixer.name].divides_tokens}):
        faults.append(
            f"parallel.context={context} with model.attention={name}, which attends over the tokens of its own rank "
            "only; set --parallel.context=1 or --model.attention=causal"
        )
    for mixer in mixers:
        heads = mixer.heads // tensor
        kernel = config.kernels.attention
        gathers_keys = share_heads(heads, mixer.kv_heads // tensor, context).gathers_keys
        allowed = ("auto", *list_gather_kernels(mixer.softcap, config.data.document_mask))
        if gathers_keys and kernel not in allowed:
            divisors = " or ".join(str(n) for n in nearest_divisors(heads, context))
            faults.append(
                f"kernels.attention={kernel} cannot mask the queries of a slice, which parallel.context={context} "
                f"needs because it does not divide the {heads} heads of a tensor-parallel rank; set "
                f"--kernels.attention={' or '.join(allowed)}, or --parallel.context={divisors}"
            )
    return list(dict.fromkeys(faults))


def _one_stage_faults(parallel: ParallelConfig) -> list[str]:
    """Return the faults of several chunks on a single stage, which only help with large micro-batch groups."""
    chunks = f"parallel.virtual_stages={parallel.virtual_stages} with parallel.pipeline=1"
    faults = []
    if parallel.micro_batch_group_size is None:
        faults.append(
            f"{chunks} gains nothing in groups of one micro-batch; set --parallel.micro_batch_group_size to the "
            "micro-batches of a step, or --parallel.virtual_stages=1"
        )
    if parallel.zero == 2:
        faults.append(
            f"{chunks} cannot be combined with parallel.zero=2, which reduces gradients after every micro-batch and "
            "gains nothing from large groups; set --parallel.zero=1, or --parallel.virtual_stages=1"
        )
    return faults


def _tensor_faults(model: ModelConfig, tensor: int) -> list[str]:
    """Return a sentence for each size that tensor parallelism does not divide evenly."""
    sizes = {"model.heads": model.heads}
    if model.num_kv_heads != model.heads:
        sizes["model.kv_heads"] = model.num_kv_heads
    sizes["model.ffn_hidden"] = model.ffn
    for letter, kind in model.layer_kinds.items():
        kind_sizes = {"kv_heads": kind.kv_heads, "ffn_hidden": kind.ffn_hidden}
        sizes |= {f"model.layer_kinds.{letter}.{key}": size for key, size in kind_sizes.items() if size is not None}
    sizes["model.sequence_length"] = model.sequence_length
    faults = []
    common_divisor = gcd(*sizes.values(), model.padded_vocab)
    ranks = " or ".join(str(n) for n in nearest_divisors(common_divisor, tensor))
    for key, value in sizes.items():
        if value % tensor:
            advice = f"use --parallel.tensor={ranks} (fits all sizes)"
            if "heads" not in key:
                # Other numbers of heads rarely divide the width, so the advice for heads names parallel.tensor only.
                multiples = " or ".join(str(n) for n in nearest_multiples(value, tensor))
                advice += f" or --{key}={multiples}"
            faults.append(f"{key}={value} is not divisible by parallel.tensor={tensor}; {advice}")
    if model.padded_vocab % tensor:
        multiple = model.vocab_multiple * tensor // gcd(model.vocab_multiple, tensor)
        faults.append(
            f"the padded vocabulary {model.padded_vocab} (model.vocab_size={model.vocab} rounded up to a multiple of "
            f"model.vocab_multiple={model.vocab_multiple}) is not divisible by parallel.tensor={tensor}; "
            f"use --model.vocab_multiple={multiple} or --parallel.tensor={ranks}"
        )
    return faults


def nearest_divisors(value: int, target: int) -> list[int]:
    """Return the divisors of `value` nearest to `target`: the largest one of at most `target`, and the next if any."""
    small_divisors = [n for n in range(1, isqrt(value) + 1) if value % n == 0]
    divisors = sorted({*small_divisors, *(value // n for n in small_divisors)})
    below = [n for n in divisors if n <= target][-1:]
    above = [n for n in divisors if n > target][:1]
    return below + above


def nearest_multiples(value: int, factor: int) -> list[int]:
    """Return the multiples of `factor` around `value`: the largest one of at most `value` if positive, and the next."""
    below = value // factor * factor
    return [n for n in (below, below + factor) if n > 0]
