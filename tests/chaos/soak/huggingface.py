"""Random models through Hugging Face, both ways: the logits of `transformers` itself, or a refusal naming the key."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megascale.config import ModelConfig, from_tree
from megascale.core.inventory import logical_shapes
from megascale.errors import ConfigError, DataError, describe_install
from megascale.model.huggingface.export import write_folder
from megascale.model.huggingface.families import choose_family
from megascale.model.huggingface.family import Family
from megascale.model.huggingface.import_model import ImportedModel, read_folder
from megascale.model.transformer import Chunk
from megascale.parallel.parameters import get_spec, list_piece_views, materialise
from tests.chaos.soak.command import Report, SoakCase
from tests.chaos.soak.huggingface_cases import REMOVED, Choose, Ours, Theirs, ours, theirs

CLOSE = 2e-4  # of the largest logit, or absolute below 1: float32, summed in other orders


def run(cases: range, seed: int, folder: Path, report: Report) -> None:
    """Random models, every other one theirs and ours."""
    torch.set_num_threads(1)
    transformers = quiet_transformers()
    for number in cases:
        location = folder / f"case-{number}"
        location.mkdir(parents=True, exist_ok=True)
        choose = random.Random(f"{seed}-{number}").choice
        report(case(transformers, choose, number % 2 == 0, location))
        shutil.rmtree(location)


def quiet_transformers() -> Any:
    """The package, without its talk and without a network; ConfigError if it is not there."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"the part huggingface needs the package transformers; {describe_install('dev')}") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def case(transformers: Any, choose: Choose, from_theirs: bool, folder: Path) -> SoakCase:
    """Draw a model, bring it through, and say whether what came of it was right."""
    drawn = theirs(choose) if from_theirs else ours(choose)
    try:
        if isinstance(drawn, Theirs):
            return SoakCase(_name(drawn), *_import(transformers, drawn, folder))
        return SoakCase(_name(drawn), *_export(transformers, drawn, folder))
    except Exception as error:
        return SoakCase(_name(drawn), False, f"{type(error).__name__}: {error}")


def _name(drawn: Theirs | Ours) -> str:
    """Enough to make the model again."""
    if isinstance(drawn, Ours):
        return f"ours, as {drawn.family}: " + ", ".join(f"{key}={value}" for key, value in drawn.keys.items())
    parts = [f"{key}={value}" for key, value in drawn.settings.items() if not key.endswith("_token_id")]
    parts += [f"config.json: {key} {'taken out' if v is REMOVED else f'= {v}'}" for key, v in drawn.edits.items()]
    return f"theirs, {drawn.family}: " + ", ".join(parts)


def _import(transformers: Any, drawn: Theirs, folder: Path) -> tuple[bool, str]:
    """Theirs, read here: its logits; and written again and loaded there, once more."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(drawn.family, **drawn.settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder / "theirs")
    settings = json.loads((folder / "theirs" / "config.json").read_text()) | drawn.edits
    retained = {key: value for key, value in settings.items() if value is not REMOVED}
    (folder / "theirs" / "config.json").write_text(json.dumps(retained))
    try:
        result = read_folder(folder / "theirs")
    except DataError as error:
        return _refusal(drawn.refused, str(error).replace(str(folder), ""))
    if drawn.refused is not None:
        return False, f"imported in spite of {drawn.refused}"
    tokens = _tokens(result.model, drawn.length)
    expected = _theirs_logits(_load(transformers, folder / "theirs"), tokens)
    off = _off(_logits(result, tokens), expected)
    if off > CLOSE:
        return False, f"logits here are off by {off:.2g}"
    _write(folder / "ours", result.family, result.model, result.tensors)
    off = _off(_theirs_logits(_load(transformers, folder / "ours"), tokens), expected)
    return off <= CLOSE, f"logits here and written again, off by {off:.1g}"


def _export(transformers: Any, drawn: Ours, folder: Path) -> tuple[bool, str]:
    """Ours, written and loaded there: our logits; and read again here, once more."""
    model = from_tree({"model": {key: value for key, value in drawn.keys.items() if value is not None}}).model
    try:
        family = choose_family(model, drawn.family)
        chosen = choose_family(model)
    except ConfigError as error:
        return _refusal(drawn.refused and f"model.{drawn.refused}=", str(error))
    if drawn.refused is not None:
        return False, f"exported in spite of model.{drawn.refused}"
    generator = torch.Generator().manual_seed(2)
    tensors = {n: torch.empty(s).normal_(0, 0.3, generator=generator) for n, s in logical_shapes(model).items()}
    tokens = _tokens(model, drawn.length)
    expected = whole_logits(chunk_of(model, tensors), tokens)
    worst = 0.0
    for number, item in enumerate(dict.fromkeys([family.name, chosen.name])):
        out = folder / f"out-{number}"
        _write(out, choose_family(model, item), model, tensors)
        worst = max(worst, _off(_theirs_logits(_load(transformers, out), tokens), expected))
        worst = max(worst, _off(_logits(read_folder(out), tokens), expected))
    return worst <= CLOSE, f"logits there and read again, off by {worst:.1g}"


def _refusal(expected: str | None, output: str) -> tuple[bool, str]:
    if expected is None:
        return False, f"refused, and should not be: {output}"
    return expected in output, f"refused: {output}"


def _tokens(model: ModelConfig, length: int) -> torch.Tensor:
    """[2, length] random tokens."""
    return torch.randint(0, model.vocab, (2, length), generator=torch.Generator().manual_seed(5))


def _write(out: Path, family: Family, model: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    write_folder(out, family, model, lambda names: tensors, dtype=torch.float32, file_bytes=1 << 30)


def _load(transformers: Any, folder: Path) -> Any:
    """Load as users do. Every tensor of the model must come from the folder."""
    model, result = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    if any(result.values()):
        raise DataError(f"{folder}: transformers finds {result}")
    return model.eval()


@torch.no_grad()
def _theirs_logits(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens_BS).logits
    return logits


def _logits(result: ImportedModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    return whole_logits(chunk_of(result.model, result.tensors), tokens_BS)


@torch.no_grad()
def whole_logits(chunk: Chunk, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [batch, sequence, vocab] of a whole model of ours."""
    return chunk.compute_logits(chunk(tokens_BS.t())).transpose(0, 1)


def chunk_of(model: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Chunk:
    """Our model with given logical tensors."""
    chunk = Chunk(model, range(model.layers), is_first=True, is_last=True)
    materialise(chunk, {p: torch.zeros(p.shape) for p in chunk.parameters()})
    for p in chunk.parameters():
        for piece, view in list_piece_views(get_spec(p), p.data):
            view.copy_(tensors[piece.name])
    return chunk.requires_grad_(False)


def _off(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, against the largest logit where that is above 1; infinite for NaN and infinite values."""
    difference = (result - expected).abs().max() / max(1.0, float(expected.abs().max()))
    return float(torch.nan_to_num(difference, nan=torch.inf))
