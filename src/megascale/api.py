"""MegaScale from Python: the functions that the command line calls.

Train for 100 steps::

    from megascale.api import load_config, train
    result = train(load_config("examples/stdlib.toml", ["--train.steps=100"]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.config import Config, resolve_precision
from megascale.config import load as load_config
from megascale.errors import ConfigError, MegascaleError

if TYPE_CHECKING:
    from megascale.data.prepare.builder import BuildResult
    from megascale.train.chat import ChatSession
    from megascale.train.convert_model import Conversion
    from megascale.train.evaluation import Evaluation
    from megascale.train.loop import TrainResult
    from megascale.train.parking import Parking

__all__ = [
    "RunDescription",
    "build_data",
    "describe",
    "evaluate",
    "export_adapter",
    "export_model",
    "generate",
    "import_model",
    "load_config",
    "open_chat",
    "resolve",
    "train",
]


@dataclass(frozen=True)
class RunDescription:
    """Sizes of a run that a configuration describes, before any step.

    Attributes:
        config: the resolved configuration, with the vocabulary size.
        parameters: number of parameters in total.
        embedding_parameters: number of parameters of embeddings and logits.
        flops_per_token: FLOPs of forward and backward, under core.flops.CONVENTION.
        tokens: tokens of the complete run.
    """

    config: Config
    parameters: int
    embedding_parameters: int
    flops_per_token: float
    tokens: int


def resolve(config: Config) -> Config:
    """Return the configuration with the settings that depend on files.

    These are the model of checkpoint.start_from or of a Hugging Face folder in checkpoint.imported, and the vocabulary
    size of the tokenizer. Raises ConfigError or DataError if the tokenizer is missing or does not fit model.vocab_size.
    """
    if config.checkpoint.start_from is not None:
        from megascale.train.trained_config import adopt_model

        config = adopt_model(config)
    config = adopt_imported_model(config)
    vocab_size = config.model.vocab_size
    has_tokenizer = config.data.tokenizer is not None
    if vocab_size is not None and not (config.data.train and has_tokenizer):
        return config
    from megascale.data.dataset.data_checks import check_entry
    from megascale.data.dataset.tokenizer_agreement import check_unchanged_tokenizer
    from megascale.data.tokenizer.tokenizer import load_run_tokenizer

    if config.data.train and not has_tokenizer:
        check_entry(config.data.train[0])  # the default tokenizer is in the folder of the first entry
        check_unchanged_tokenizer(config.data)
    tokenizer_size = load_run_tokenizer(config.data).vocab_size
    if vocab_size is None:
        model = config.model.model_copy(update={"vocab_size": tokenizer_size})
        return config.model_copy(update={"model": model})
    if vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer_size} tokens; "
            f"drop the key or set --model.vocab_size={tokenizer_size}"
        )
    return config


def adopt_imported_model(config: Config) -> Config:
    """Return the configuration with the model and the tokenizer of the Hugging Face folder in checkpoint.imported.

    Raises DataError if the folder is not a model, ConfigError if a given key of [model] contradicts it.
    """
    from megascale.core.model_folder import is_model_folder

    folder = config.checkpoint.imported
    # The configuration of a run that was imported before has all keys of its model, so torch need not be loaded.
    is_complete = bool(config.model.model_fields_set) and folder is not None and not is_model_folder(folder)
    if folder is None or is_complete or config.checkpoint.start_from is not None:
        return config
    from megascale.train.imported_weights import adopt_folder

    return adopt_folder(config)


def describe(config: Config) -> RunDescription:
    """Return the sizes of a run on this machine without starting it."""
    from megascale.core.flops import count_parameters, count_training_flops

    config = resolve_precision(resolve(config), visible_gpus(config) > 0)
    model = config.model
    training = config.train
    parameters = count_parameters(model)
    return RunDescription(
        config=config,
        parameters=parameters,
        embedding_parameters=parameters - count_parameters(model, embeddings=False),
        flops_per_token=count_training_flops(model, training.lora is not None),
        tokens=training.steps * training.global_batch * model.sequence_length,
    )


def build_data(out: str | Path, **options: object) -> BuildResult:
    """Make a data set folder; see megascale.data.prepare.builder.build for the options."""
    from megascale.data.prepare.builder import build

    return build(out, **options)  # type: ignore[arg-type]


def train(config: Config) -> TrainResult:
    """Train as this process's rank of the world (one process, or one of several), resuming from the newest checkpoint.

    Under `megascale launch`, the process may also wait before the first attempt and between two attempts ("parking"),
    so that it need not start again.

    Raises subclasses of MegascaleError with a message for the user; KeyboardInterrupt after a clean interruption.
    """
    from megascale.core.layout import lay_out
    from megascale.train.claim import record_refusal
    from megascale.train.host_check import check_local_ranks
    from megascale.train.loop import Trainer
    from megascale.train.parking import is_waiting_for_first_attempt, open_parking
    from megascale.train.rank_info import find_rank_info, has_bfloat16
    from megascale.train.resume import check_adapter_base

    parking = open_parking()  # None unless the launcher has asked for it
    try:
        config = resolve(config)
        if parking is not None:
            parking.wait_if_early(config)
        check_adapter_base(config)
        rank_info = find_rank_info(config)
        config = resolve_precision(config, has_bfloat16(rank_info.device))
        layout = lay_out(_set_data_size(config, parking), rank_info.world)
        check_local_ranks(layout, rank_info, saves_checkpoints=True)
    except MegascaleError as error:
        record_refusal(config, str(error), error)
        raise
    if parking is not None and is_waiting_for_first_attempt():
        parking.wait_for_first_attempt(config, rank_info)
        rank_info = find_rank_info(config)
        layout = lay_out(_set_data_size(config, parking), rank_info.world)
    while True:
        trainer = Trainer(layout, rank_info, parking)
        try:
            return trainer.run()
        except Exception as error:
            if parking is None or parking.error is None:
                raise
            # The process stays for the next attempt. Raises TrainingError if it could not leave this attempt cleanly.
            parking.check_left(error, trainer.folder, rank_info.rank, trainer.step)
        folder, step = trainer.folder, trainer.step
        del trainer  # frees the memory that the failed attempt held
        parking.wait_for_next_attempt(folder, rank_info.rank, step)
        rank_info = find_rank_info(config)
        layout = lay_out(_set_data_size(config, parking), rank_info.world)


def _set_data_size(config: Config, parking: Parking | None) -> Config:
    """Return the configuration with the data-parallel size of the present attempt, which may differ from the first."""
    from megascale.train.parking import with_data_size

    if parking is None:
        return config
    return with_data_size(config, parking.data_size)


def evaluate(
    run: str | Path,
    file: str | None = None,
    *,
    stride: int | None = None,
    step: int | None = None,
    device: str = "auto",
    linear_precision: str | None = None,
    context: int = 1,
    on_progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Return the loss of a run's checkpoint on a token file.

    Args:
        file: token file; default: the run's own data.valid.
        stride: tokens that each window predicts, so that windows may overlap; default: model.sequence_length, the
            length of a window.
        step: step of the checkpoint; default: the newest.
        linear_precision: replaces the train.linear_precision of training.
        context: number of processes that divide the tokens of each window. Each of them, started by torchrun, calls
            this function.
        on_progress: called before each batch with the number of windows that are evaluated and of all.

    Raises DataError if the file was tokenized with another tokenizer than the run's data.
    """
    from megascale.checkpoint.chunk_source import LoadReport
    from megascale.data.dataset import manifest, tokenizer_agreement
    from megascale.train.context_ranks import join_ranks
    from megascale.train.evaluation import evaluate_file
    from megascale.train.rank_info import choose_device
    from megascale.train.restore import restore_engine
    from megascale.train.run_folder import load_run_config

    run = Path(run)
    choose_device(device)  # refuse a missing device before any work
    if file == "":
        raise ConfigError("--file is empty; name a token file, or omit the option for data.valid")
    config = load_run_config(run)
    option = "data.valid" if file is None else "--file"
    prefix = config.data.valid if file is None else file
    if prefix is None:
        raise ConfigError("the run has no data.valid; name a token file, such as --file datasets/stdlib/valid")
    # Check the file before the model is loaded, which may take long.
    identity = tokenizer_agreement.read_identity(run) or tokenizer_agreement.check_run_tokenizer(run, config.data)
    tokenizer_agreement.check_token_file(option, prefix, identity, config.model.vocab_size)
    manifest.check_sampled_tokens(option, prefix)
    with join_ranks(config, context, device) as ranks:
        report = LoadReport()
        engine, config = restore_engine(
            run, step=step, device=device, linear_precision=linear_precision, ranks=ranks, report=report
        )
        evaluation = evaluate_file(engine, config, prefix, stride=stride, option=option, on_progress=on_progress)
    return replace(evaluation, step=report.step)


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
    context: int = 1,
    on_note: Callable[[str], object] | None = None,
    on_step: Callable[[int | None], object] | None = None,
) -> Iterator[str]:
    """Continue `prompt` with a run's checkpoint, and yield the text in pieces, without the prompt.

    With `context` above 1, that number of processes, started by torchrun, divide the tokens of the prompt. All of them
    call this function and yield the same text.

    The text ends after `tokens` tokens, at the tokenizer's end of document, at an end token of the imported model's
    generation settings, or before the first of the texts `stop`. `on_note` receives a sentence if the prompt is longer
    than the training's sequences, or if learned positions end before `tokens` tokens. `on_step` receives the step of
    the checkpoint once it is loaded.
    """
    from megascale.checkpoint.chunk_source import LoadReport
    from megascale.model.huggingface.generation_config import list_end_ids, load_generation_config
    from megascale.train.context_ranks import join_ranks
    from megascale.train.generation import Sampling, decode_stream, explain_length, generate_tokens
    from megascale.train.rank_info import choose_device
    from megascale.train.restore import restore_model
    from megascale.train.trained_config import load_trained_config, load_trained_tokenizer

    run = Path(run)
    choose_device(device)  # refuse a missing device before any work
    if "" in stop:
        raise ConfigError("--stop is an empty text, which every text begins with; name the text to end before")
    config, _ = load_trained_config(run, step)
    _, tokenizer = load_trained_tokenizer(run, config, step)  # may fail, so it comes before the model's long loading
    ends = {tokenizer.end_of_document, *list_end_ids(load_generation_config(run))}
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    with join_ranks(config, context, device) as ranks:
        report = LoadReport()
        model, _ = restore_model(run, step=step, device=device, ranks=ranks, report=report)
        if on_step is not None:
            on_step(report.step)
        prompt_ids = tokenizer.encode_prompt(prompt)
        note = explain_length(prompt_ids, tokens, model.model)
        if note and on_note is not None:
            on_note(note)
        stream = generate_tokens(model, prompt_ids, tokens, sampling, ends=ends)
        yield from decode_stream(tokenizer, stream, stop, tokenizer.encode(prompt))


def open_chat(
    run: str | Path,
    *,
    system: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    device: str = "auto",
) -> ChatSession:
    """Open a conversation with a run's checkpoint; its `reply(text)` yields the answer in pieces.

    Messages are rendered by the chat template of the run's tokenizer. A reply ends where the template ends a turn, at
    an end token, or after `tokens` tokens. Raises DataError without a template.
    """
    from megascale.checkpoint.chunk_source import LoadReport
    from megascale.data.tokenizer.chat_template import check_special_tokens, load_chat_template
    from megascale.model.huggingface.generation_config import list_end_ids, load_generation_config
    from megascale.train.chat import ChatSession, find_chat_folder
    from megascale.train.generation import Sampling
    from megascale.train.rank_info import choose_device
    from megascale.train.restore import restore_model
    from megascale.train.trained_config import load_trained_config, load_trained_tokenizer

    run = Path(run)
    choose_device(device)  # refuse a missing device before any work
    config, _ = load_trained_config(run, step)
    file, tokenizer = load_trained_tokenizer(run, config, step)
    folder = find_chat_folder(run, file)
    template = load_chat_template(folder)
    check_special_tokens(template, folder, tokenizer)
    ends = {tokenizer.end_of_document, *list_end_ids(load_generation_config(run))}
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    report = LoadReport()
    model, _ = restore_model(run, step=step, device=device, report=report)
    return ChatSession(
        model,
        tokenizer,
        template,
        ends=ends,
        sampling=sampling,
        tokens=tokens,
        system=system,
        step=report.step,
    )


def import_model(folder: str | Path, run: str | Path, *, sequence_length: int | None = None) -> Conversion:
    """Make a run folder of a Hugging Face folder; see megascale.train.convert_model."""
    from megascale.train import convert_model

    return convert_model.import_model(Path(folder), Path(run), sequence_length=sequence_length)


def export_model(run: str | Path, out: str | Path, **options: Any) -> Conversion:
    """Write a run's model as a folder that `transformers` loads; see megascale.train.convert_model for the options."""
    from megascale.train import convert_model

    return convert_model.export_model(Path(run), Path(out), **options)


def export_adapter(run: str | Path, out: str | Path, **options: Any) -> Conversion:
    """Write a run's adapters as a folder that `peft` loads; see megascale.train.convert_model for the options."""
    from megascale.train import convert_model

    return convert_model.export_adapter(Path(run), Path(out), **options)


def visible_gpus(config: Config | None = None) -> int:
    """Return the number of CUDA devices that this process sees; 0 if `config` trains on the CPU."""
    if config is not None and config.train.device == "cpu":
        return 0  # without loading torch, which takes longer than all other work of a launcher
    import torch

    return torch.cuda.device_count()
