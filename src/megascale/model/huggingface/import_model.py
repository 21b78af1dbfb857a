"""A Hugging Face folder read into logical tensors: config.json, and safetensors files (never pickle)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megascale.config import ModelConfig, from_tree
from megascale.core import strict_json
from megascale.core.inventory import logical_shapes
from megascale.core.untrusted_files import is_plain_name, read_bounded
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.families import FAMILIES
from megascale.model.huggingface.generation_config import import_generation_config
from megascale.model.huggingface.settings import Family, Keys
from megascale.model.huggingface.tensor_names import Weight, split_weight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_DTYPES = {"float64", "float32", "bfloat16", "float16"}
_SHOWN = 4
_JSON_BYTES = 64 << 20  # of config.json, or of the list of tensors: a million of them


@dataclass(frozen=True)
class Imported:
    """What a folder holds.

    Attributes:
        family: of transformers.
        model: the same in our keys.
        tensors: logical tensors by name, whole, views of the mapped files where strides allow.
        generation: settings of generation, with the tokens that begin and end a text.
        notes: what a person should know: what is not the same in training here, and files that were passed over.
    """

    family: Family
    model: ModelConfig
    tensors: dict[str, Tensor]
    generation: dict[str, Any]
    notes: list[str]


def read_folder(folder: Path) -> Imported:
    """Read a model's configuration and tensors.

    Raises DataError if the folder is not a model, is of an unknown family, has a setting without a counterpart here
    (naming it), has no safetensors, or its tensors are not those of its configuration.
    """
    settings = _json(folder / "config.json", "it is no folder of a Hugging Face model")
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise DataError(
            f"{folder / 'config.json'} has model_type={str(name)[:100]!r}; the families that can be imported are "
            f"{', '.join(FAMILIES)}"
        )
    family, keys = FAMILIES[name], Keys(settings, str(folder / "config.json"))
    if keys.get("quantization_config") is not None:
        raise keys.refuse(
            "quantization_config",
            keys.get("quantization_config"),
            "quantised weights cannot be imported; take the model's unquantised files",
        )
    keys.only("is_causal", True, "attention to later tokens cannot be represented", default=True)
    keys.only("per_layer_config", {}, "settings that differ between layers cannot be represented", default={})
    if keys.get("transformers_weights") is not None:
        raise keys.refuse(
            "transformers_weights",
            keys.get("transformers_weights"),
            f"transformers reads the weights from that file; rename it to {SINGLE} or {INDEX} and remove the key",
        )
    if (folder / ADAPTER).exists():
        raise DataError(
            f"{folder} holds {ADAPTER}: transformers adds that adapter to the weights. Merge it into the model "
            "(merge_and_unload of peft, then save_pretrained) and import the merged folder, or remove the file"
        )
    if keys.get("auto_map") is not None:
        keys.notes.append("auto_map names code of the model's own; it is left out, as transformers does unless told")
    try:
        model = from_tree({"model": family.read_config(keys)}).model
    except ConfigError as error:
        raise DataError(f"{keys.source} makes no model here: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{keys.source} has a setting of the wrong kind ({error}); is it a {name}'s?") from None
    files = Files(folder, family)
    keys.notes += files.notes
    if model.layers > len(files):
        raise DataError(f"{keys.source} has {model.layers} layers, but the folder holds {len(files)} tensors in all")
    weights = family.list_weights(model)
    _check_names(files, family, model, weights)
    shapes = logical_shapes(model)
    tensors: dict[str, Tensor] = {}
    for weight in weights:
        stored = files.tensor(weight.name)
        wanted = weight.shape(shapes)
        if tuple(stored.shape) != wanted:
            raise DataError(
                f"{folder}: {weight.name} is {list(stored.shape)}, but by config.json it should be {list(wanted)}; "
                "the configuration and the weights are not of one model"
            )
        tensors |= split_weight(weight, stored)
    generation, notes = import_generation_config(folder, settings)
    return Imported(family, model, tensors, generation, keys.notes + notes)


class Files:
    """The tensors of a folder by name, whichever file they lie in; files are mapped, not read.

    Of two sets of weights the same one counts as for transformers: model.safetensors goes before shards with an index.

    Attributes:
        notes: files that were passed over, for a person.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder, self._family = folder, family
        self.notes: list[str] = []
        self._open: dict[str, Any] = {}
        # Full name to the name in the file and the file.
        self._places: dict[str, tuple[str, str]] = {}
        for file in self._find_files():
            for name in self._names_in(file):
                self._add(name, file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its full name; DataError if its file is damaged or it is of a type without a counterpart."""
        stored, file = self._places[name]
        try:
            tensor = self._handle(file).get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, error) from None
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _DTYPES:
            raise DataError(f"{self.folder}: {name} is of type {kind}; only {', '.join(sorted(_DTYPES))} is imported")
        return tensor

    def _full(self, name: str) -> str:
        """With the family's prefix, which files saved from the model without its head leave out."""
        heads = (self._family.head.partition(".")[0] + ".", "lm_head.")
        if name.startswith((self._family.prefix, *heads)):
            # GPT-NeoX has its head under either name, by the version that saved it.
            return self._family.head if name == "lm_head.weight" else name
        return self._family.prefix + name

    def _find_files(self) -> list[str]:
        """Return the names of the files that hold the weights."""
        if (self.folder / SINGLE).exists() and not (self.folder / SINGLE).is_dir():
            if (self.folder / INDEX).exists():
                self.notes.append(f"{INDEX} and its files were not read: {SINGLE} goes first, as in transformers")
            return [SINGLE]
        if not (self.folder / INDEX).exists():
            raise DataError(self._no_safetensors())
        places = _json(self.folder / INDEX, "").get("weight_map", {})
        if not isinstance(places, dict):
            raise DataError(f"{self.folder / INDEX} has a weight_map that is none: it names no files")
        for file in places.values():
            if not isinstance(file, str) or not is_plain_name(file):
                raise DataError(f"{self.folder / INDEX} names the file {file!r}, which is not in the folder itself")
        return sorted(set(places.values()))

    def _names_in(self, file: str) -> list[str]:
        """Return the names of a file's tensors."""
        try:
            return list(self._handle(file).keys())
        except (SafetensorError, OSError) as error:
            raise self._damaged(file, error) from None

    def _add(self, name: str, file: str) -> None:
        """Note where a tensor lies; DataError if another one of the same meaning was noted before."""
        full = self._full(name)
        if full in self._places and not re.search(self._family.buffers, full):
            other, where = self._places[full]
            raise DataError(
                f"{self.folder} holds {full} twice, as {other} in {where} and as {name} in {file}, so it is unclear "
                "which one counts; remove the files that are not part of the model"
            )
        self._places[full] = (name, file)

    def _no_safetensors(self) -> str:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in self.folder.glob(pattern))
        if not pickles:
            return f"{self.folder} has neither {SINGLE} nor {INDEX}; name a folder that holds a model's safetensors"
        return (
            f"{self.folder} holds {pickles[0]} but no safetensors; such files are pickles, which can run any program "
            "when opened, and are never read here. If you trust where it is from, turn it into safetensors with "
            f"`python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{self.folder}')"
            ".save_pretrained('converted')\"` and import that folder"
        )

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            if not (self.folder / file).is_file():  # a pipe would hold whoever opens it
                raise FileNotFoundError("there is no such file")
            self._open[file] = safe_open(str(self.folder / file), "pt")
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> DataError:
        return DataError(f"{self.folder / file} cannot be read ({error}); it is missing or damaged: get it again")


def _check_names(files: Files, family: Family, model: ModelConfig, weights: list[Weight]) -> None:
    """DataError unless the files hold the family's tensors, all and no other."""
    wanted = {weight.name for weight in weights}
    missing = sorted(wanted - set(files))
    if missing:
        raise DataError(
            f"{files.folder} has no {', '.join(missing[:_SHOWN])}{' ...' if len(missing) > _SHOWN else ''} "
            f"({len(missing)} of the {len(wanted)} tensors that a {family.name} of this config.json has are missing)"
        )
    extra = sorted(name for name in files if name not in wanted and not re.search(family.buffers, name))
    if model.tied_embeddings and family.head in extra:
        extra.remove(family.head)
        if not files.tensor(family.head).equal(files.tensor(weights[0].name)):
            raise DataError(
                f"{files.folder}: tie_word_embeddings is true, but {family.head} differs from {weights[0].name}; set "
                "tie_word_embeddings to false in config.json if the logits have weights of their own"
            )
    if extra:
        raise DataError(
            f"{files.folder} holds {', '.join(extra[:_SHOWN])}{' ...' if len(extra) > _SHOWN else ''} "
            f"({len(extra)} tensors) for which a {family.name} of this config.json has no place"
        )


def _json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        found = strict_json.loads(read_bounded(path, _JSON_BYTES), _JSON_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {otherwise}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a JSON file that can be read: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object; it is no configuration of a model")
    return found
