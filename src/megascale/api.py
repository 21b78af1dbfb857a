"""MegaScale from Python: the few names that the command line itself is made of.

A run in two lines::

    from megascale.api import load_config, train
    result = train(load_config("examples/stdlib.toml", ["--train.steps=100"]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.config import Config, with_precision
from megascale.config import load as load_config
from megascale.errors import ConfigError, MegascaleError

if TYPE_CHECKING:
    from megascale.data.prepare.builder import Built
    from megascale.train.convert_model import Converted
    from megascale.train.evaluation import Evaluation
    from megascale.train.loop import TrainResult

__all__ = [
    "RunDescription",
    "build_data",
    "describe",
    "evaluate",
    "export_model",
    "generate",
    "import_model",
    "load_config",
    "resolve",
    "train",
]


@dataclass(frozen=True)
class RunDescription:
    """What a configuration amounts to, before any step.

    Attributes:
        config: resolved (vocabulary known).
        parameters, embedding_parameters: trained numbers in all, and in embeddings and logits.
        flops_per_token: forward and backward, under core.flops.CONVENTION.
        tokens: of the whole run.
    """

    config: Config
    parameters: int
    embedding_parameters: int
    flops_per_token: float
    tokens: int


def resolve(config: Config) -> Config:
    """Fill in what depends on data: the vocabulary size from the tokenizer; checks that both agree.

    Raises ConfigError or DataError as the tokenizer is missing or does not fit model.vocab_size.
    """
    if not config.data.train and config.model.vocab_size is not None:
        return config
    from megascale.data.dataset.presence import check_entry
    from megascale.data.dataset.tokenizer_agreement import check_replaced
    from megascale.data.tokenizer.tokenizer import tokenizer_for

    if config.model.vocab_size is not None and config.data.tokenizer is None:
        return config
    if config.data.train and config.data.tokenizer is None:
        check_entry(config.data.train[0])  # the tokenizer is looked for beside it
        check_replaced(config.data)
    size = tokenizer_for(config.data).vocab_size
    if config.model.vocab_size is None:
        model = config.model.model_copy(update={"vocab_size": size})
        return config.model_copy(update={"model": model})
    if config.model.vocab_size < size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {size} tokens; "
            f"drop the key or set --model.vocab_size={size}"
        )
    return config


def describe(config: Config) -> RunDescription:
    """Sizes of a run here without starting it."""
    from megascale.core.flops import flops_per_token, parameters

    config = with_precision(resolve(config), visible_gpus(config) > 0)
    total = parameters(config.model)
    return RunDescription(
        config,
        total,
        total - parameters(config.model, embeddings=False),
        flops_per_token(config.model).training,
        config.train.steps * config.train.global_batch * config.model.sequence_length,
    )


def build_data(out: str | Path, **options: object) -> Built:
    """Make a data set folder; see megascale.data.prepare.builder.build for the options."""
    from megascale.data.prepare.builder import build

    return build(out, **options)  # type: ignore[arg-type]


def train(config: Config) -> TrainResult:
    """Train as this process's rank of the world (alone, or as one of several that were started); resumes by itself.

    Raises MegascaleError subclasses with a message for a person; KeyboardInterrupt after a clean interruption.
    """
    from megascale.core.layout import lay_out
    from megascale.train.claim import tell_refusal
    from megascale.train.loop import Trainer
    from megascale.train.rank_info import check_place, find_rank_info, has_bfloat16

    try:
        config = resolve(config)
        place = find_rank_info(config)
        config = with_precision(config, has_bfloat16(place.device))
        lay_out(config, place.world)
        check_place(config, place, saves_checkpoints=True)
    except MegascaleError as error:
        tell_refusal(config, str(error), error)
        raise
    return Trainer(config, place).run()


def evaluate(
    run: str | Path,
    file: str | None = None,
    *,
    stride: int | None = None,
    step: int | None = None,
    device: str = "auto",
    linear_precision: str | None = None,
) -> Evaluation:
    """Loss of a run's checkpoint on a token file (default: the run's own data.valid).

    `stride`: tokens that each window predicts; default: all of its model.sequence_length. `linear_precision`: another
    train.linear_precision than that of training. DataError if the file's tokens are another tokenizer's than the run's.
    """
    from megascale.data.dataset import integrity, tokenizer_agreement
    from megascale.train.device_choice import choose_device
    from megascale.train.evaluation import evaluate_file
    from megascale.train.restore import restore_engine
    from megascale.train.run_folder import run_config

    choose_device(device)  # what is not there is refused before any work
    config = run_config(Path(run))
    prefix, named = file or config.data.valid, "--file" if file else "data.valid"
    if prefix is None:
        raise ConfigError("the run has no data.valid; name a token file, such as --file datasets/stdlib/valid")
    # Before the model, which may take a while to read.
    own = tokenizer_agreement.read_identity(Path(run)) or tokenizer_agreement.check_run(Path(run), config)
    tokenizer_agreement.check_tokens(named, prefix, own, config.model.vocab_size)
    integrity.check_sample(named, prefix)
    engine, config = restore_engine(Path(run), step=step, device=device, linear_precision=linear_precision)
    return evaluate_file(engine, config, prefix, stride=stride, option=named)


def generate(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    step: int | None = None,
    device: str = "auto",
) -> Iterator[str]:
    """Continue `prompt` with a run's checkpoint, piece by piece (the prompt itself is not repeated).

    The text ends after `tokens` tokens, at the tokenizer's end of a document, at an end of a text of the model that was
    imported, or before the first of the texts `stop`.
    """
    from megascale.model.huggingface.generation_config import end_ids, load_generation_config
    from megascale.train.device_choice import choose_device
    from megascale.train.generation import Sampling, generate_tokens, text_of
    from megascale.train.restore import restore_model
    from megascale.train.resume import trained_config, trained_tokenizer

    choose_device(device)  # what is not there is refused before any work
    if "" in stop:
        raise ConfigError("--stop is an empty text, which every text begins with; name the text to end before")
    config, _ = trained_config(Path(run), step)
    _, tokenizer = trained_tokenizer(Path(run), config, step)  # before the model, which may take a while to read
    ends = {tokenizer.end_of_document, *end_ids(load_generation_config(Path(run)))}
    model, _ = restore_model(Path(run), step=step, device=device)
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    made = generate_tokens(model, tokenizer.encode_prompt(prompt), tokens, sampling, ends=ends)
    yield from text_of(tokenizer, made, stop, tokenizer.encode(prompt))


def import_model(folder: str | Path, run: str | Path, *, sequence_length: int | None = None) -> Converted:
    """Make a run folder of a Hugging Face folder; see megascale.train.convert_model."""
    from megascale.train import convert_model

    return convert_model.import_model(Path(folder), Path(run), sequence_length=sequence_length)


def export_model(run: str | Path, out: str | Path, **options: Any) -> Converted:
    """Write a run's model as a folder that `transformers` loads; see megascale.train.convert_model for the options."""
    from megascale.train import convert_model

    return convert_model.export_model(Path(run), Path(out), **options)


def visible_gpus(config: Config | None = None) -> int:
    """CUDA devices that this process sees, for the run of `config` if one is given: one on CPU has none."""
    if config is not None and config.train.device == "cpu":
        return 0  # nor is torch loaded for that, which takes longer than all else that a launcher does
    import torch

    return torch.cuda.device_count()
