"""Reading of a Hugging Face folder as logical tensors: config.json and safetensors files, never pickles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megascale.config import ModelConfig, from_tree
from megascale.core import strict_json
from megascale.core.inventory import logical_shapes
from megascale.core.untrusted_files import is_lfs_pointer, is_plain_name, read_bounded
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.families import FAMILIES
from megascale.model.huggingface.family import ConfigKeys, Family, StoredWeight
from megascale.model.huggingface.generation_config import import_generation_config
from megascale.model.huggingface.logical_tensors import LogicalTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # file of peft that marks an adapter in the folder
_FLOAT_DTYPES = {"float64", "float32", "bfloat16", "float16"}  # types that can be imported
# Prefix of torch's name of a type, by the letters of the type in safetensors.
_TYPE_PREFIXES = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint"}
_CONVERSION_ADVICE = (
    "Take the model's unquantised files, or convert the weights to bfloat16 with the tool that quantised them"
)
_COMPARED_BYTES = 64 << 20  # maximum size of each of the two blocks of rows that are compared at a time
_MAX_SHOWN_NAMES = 4  # number of tensor names in an error message
_MAX_JSON_BYTES = 64 << 20  # the index of a model with a million tensors is smaller


@dataclass(frozen=True)
class ImportedModel:
    """Content of an imported folder.

    Attributes:
        family: family of transformers.
        model: the model's configuration.
        tensors: logical tensors by name. Each access reads the files.
        generation: content of generation_config.json, with the ids of begin and end tokens.
        notes: remarks for the user: differences in training, and files that were ignored.
    """

    family: Family
    model: ModelConfig
    tensors: LogicalTensors
    generation: dict[str, Any]
    notes: list[str]


def read_folder(folder: Path) -> ImportedModel:
    """Read a model's configuration, and the names and shapes of its tensors. Weights are read at their access.

    Raises DataError if the folder does not hold a model, the family is unknown, a setting is unsupported, there are no
    safetensors, or the tensors do not match the configuration.
    """
    keys = _open_config(folder)
    family, model = read_config(keys)
    if (folder / ADAPTER).exists():
        raise DataError(
            f"{folder} holds {ADAPTER}: transformers adds that adapter to the weights. Merge it into the model "
            "(merge_and_unload of peft, then save_pretrained) and import the merged folder, or remove the file"
        )
    files = TensorFiles(folder, family)
    keys.notes += files.notes
    # The check bounds the work below: every layer has several tensors, while the configuration may claim any number.
    if model.layers > len(files):
        raise DataError(f"{keys.source} has {model.layers} layers, but the folder has only {len(files)} tensors")
    weights = family.list_weights(model)
    _check_names(files, family, model, weights)
    shapes = logical_shapes(model)
    for weight in weights:
        stored = files[weight.name]
        shape = weight.compute_shape(shapes)
        if stored.shape != shape:
            raise DataError(
                f"{folder}: {weight.name} is {list(stored.shape)}, but config.json gives {list(shape)}; "
                "the configuration and the weights belong to different models"
            )
        if stored.dtype not in _FLOAT_DTYPES:
            raise DataError(
                f"{folder}: {weight.name} is of type {stored.dtype}; only {', '.join(sorted(_FLOAT_DTYPES))} can be "
                f"imported. {_CONVERSION_ADVICE}"
            )
    if model.tied_embeddings and family.head_name in files:
        _check_tied_head(files, family.head_name, weights[0].name)
    dtypes = {weight.name: files[weight.name].dtype for weight in weights}
    tensors = LogicalTensors(weights, shapes, dtypes, files.read_rows)
    generation, notes = import_generation_config(folder, keys.values)
    return ImportedModel(family, model, tensors, generation, keys.notes + notes)


def read_model(folder: Path) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return the model configuration of a folder, and the content of its config.json. Raises DataError."""
    keys = _open_config(folder)
    _, model = read_config(keys)
    return model, keys.values


def _open_config(folder: Path) -> ConfigKeys:
    """Return a reader of the folder's config.json."""
    file = folder / "config.json"
    return ConfigKeys(_read_json(file, "name the folder of a Hugging Face model"), str(file))


def read_config(keys: ConfigKeys) -> tuple[Family, ModelConfig]:
    """Return the family and the model of a config.json. Add remarks for the user to `keys.notes`.

    Raises DataError for an unknown family, an unsupported value, and a key whose meaning is not known.
    """
    name = keys.values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise DataError(
            f"{keys.source} has model_type={str(name)[:100]!r}; the families that can be imported are "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    quantization = keys.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        raise keys.make_error(
            "quantization_config",
            quantization,
            'weights in MXFP4 cannot be imported; convert them to bfloat16 with `python -c "from transformers import '
            "AutoModelForCausalLM as M, Mxfp4Config; M.from_pretrained('FOLDER', dtype='bfloat16', "
            "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained('converted')\"` and import that folder",
        )
    if quantization is not None:
        raise keys.make_error(
            "quantization_config",
            keys.get("quantization_config"),
            "quantised weights cannot be imported; take the model's unquantised files",
        )
    keys.require_value("is_causal", True, "attention to later tokens is not supported", default=True)
    keys.require_value("per_layer_config", {}, "settings that differ between layers are not supported", default={})
    if keys.get("transformers_weights") is not None:
        raise keys.make_error(
            "transformers_weights",
            keys.get("transformers_weights"),
            f"transformers reads the weights from that file; rename it to {SINGLE_FILE} or {INDEX_FILE} and remove "
            "the key",
        )
    if keys.get("auto_map") is not None:
        keys.notes.append("auto_map names code of the model; it is ignored, as transformers does by default")
    try:
        settings = {"model": family.read_config(keys)}
        keys.refuse_unknown_keys(family)
        return family, from_tree(settings).model
    except ConfigError as error:
        raise DataError(f"{keys.source} describes an unsupported model: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Families convert values without a check of their types, and a file may contain any JSON.
        raise DataError(f"{keys.source} has a setting of the wrong kind ({error}); is it a {name}'s?") from None


@dataclass(frozen=True)
class StoredTensor:
    """Position and type of a tensor in a folder.

    Attributes:
        name: name in the file.
        file: name of the file.
        shape: stored shape.
        dtype: torch's name of the type, such as "bfloat16".
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """Tensors of all safetensors files of a folder, by name with the family's prefix.

    A file is mapped only during a read: pages of a mapping count as memory of the process, and a model may be larger
    than the host's memory. As in transformers, model.safetensors has priority over files with an index.

    Attributes:
        notes: files that were ignored, for the user.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self._family = family
        self.notes: list[str] = []
        self._tensors: dict[str, StoredTensor] = {}
        for file in self._find_files():
            for tensor in self._list_tensors(file):
                self._add_tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def read_rows(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return a copy of rows `start:stop` of a tensor. Raises DataError for a damaged file."""
        tensor = self._tensors[name]
        try:
            with self._open(tensor.file) as file:
                rows = file.get_slice(tensor.name)[start:stop]
                # The slice may be a view of the mapped file, whose pages are released when the file is closed.
                copy: Tensor = rows.clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise self._make_damage_error(tensor.file, error) from None
        expected = (len(range(tensor.shape[0])[start:stop]), *tensor.shape[1:])
        if copy.shape != expected or str(copy.dtype) != f"torch.{tensor.dtype}":
            raise DataError(f"{self.folder / tensor.file} was replaced while it was read; start again")
        if copy.numel() and not torch.stack(copy.aminmax()).isfinite().all():
            raise DataError(
                f"{self.folder / tensor.file}: {name} has NaN or infinite values, so every logit would be NaN; "
                "download the file again, or take an earlier checkpoint of the model"
            )
        return copy

    def _add_prefix(self, name: str) -> str:
        """Return the name with the family's prefix, which files of a model without its output head omit."""
        head_prefix = self._family.head_name.partition(".")[0] + "."
        if name.startswith((self._family.prefix, head_prefix, "lm_head.")):
            # Some versions of transformers save GPT-NeoX's head as lm_head.
            if name == "lm_head.weight":
                return self._family.head_name
            return name
        return self._family.prefix + name

    def _find_files(self) -> list[str]:
        """Return the names of the files that hold the weights."""
        if (self.folder / SINGLE_FILE).exists() and not (self.folder / SINGLE_FILE).is_dir():
            if (self.folder / INDEX_FILE).exists():
                self.notes.append(
                    f"{INDEX_FILE} and its files were not read: {SINGLE_FILE} has priority, as in transformers"
                )
            return [SINGLE_FILE]
        if not (self.folder / INDEX_FILE).exists():
            raise DataError(self._explain_missing_safetensors())
        weight_map = _read_json(self.folder / INDEX_FILE, "").get("weight_map", {})
        if not isinstance(weight_map, dict) or not weight_map:
            raise DataError(
                f"{self.folder / INDEX_FILE} has no weight_map that maps tensors to files; download the file again"
            )
        for file in weight_map.values():
            if not isinstance(file, str) or not is_plain_name(file):
                raise DataError(
                    f"{self.folder / INDEX_FILE} names the file {file!r}, which is not in the folder itself"
                )
        return sorted(set(weight_map.values()))

    def _list_tensors(self, file: str) -> list[StoredTensor]:
        """Return the tensors of a file."""
        tensors = []
        try:
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (it is not a dictionary)
                    view = opened.get_slice(name)
                    tensors.append(StoredTensor(name, file, tuple(view.get_shape()), _name_type(view.get_dtype())))
        except (SafetensorError, OSError) as error:
            raise self._make_damage_error(file, error) from None
        return tensors

    def _add_tensor(self, tensor: StoredTensor) -> None:
        """Add a tensor. Raises DataError if another tensor has the same name with prefix."""
        name = self._add_prefix(tensor.name)
        if name in self._tensors and not re.search(self._family.ignored_tensors, name):
            previous = self._tensors[name]  # the tensor that the name stood for so far
            raise DataError(
                f"{self.folder} holds {name} twice, as {previous.name} in {previous.file} and as {tensor.name} in "
                f"{tensor.file}; remove the files that are not part of the model"
            )
        self._tensors[name] = tensor

    def _explain_missing_safetensors(self) -> str:
        """Return the error message for a folder without safetensors, which may hold pickles."""
        pickles: list[str] = []
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
            pickles += [file.name for file in self.folder.glob(pattern)]
        pickles.sort()
        shards = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if shards:
            return (
                f"{self.folder} holds {_abbreviate(shards)}, but neither {SINGLE_FILE} nor {INDEX_FILE}, which "
                f"transformers reads; download {INDEX_FILE} too, or rename a single file to {SINGLE_FILE}"
            )
        if not pickles:
            return (
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; name a folder that holds a model's "
                "safetensors"
            )
        return (
            f"{self.folder} holds {pickles[0]} but no safetensors; such files are pickles, which can run any program "
            "when opened, and are never read. If you trust their source, convert them to safetensors with "
            f"`python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{self.folder}')"
            ".save_pretrained('converted')\"` and import that folder"
        )

    def _open(self, file: str) -> Any:
        # Opening a pipe would block.
        if not (self.folder / file).is_file():
            raise FileNotFoundError("the file does not exist")
        return safe_open(str(self.folder / file), "pt")

    def _make_damage_error(self, file: str, error: Exception) -> DataError:
        path = self.folder / file
        if is_lfs_pointer(path):
            return DataError(f"{path} is a pointer of Git LFS, not the file itself; get the file with `git lfs pull`")
        return DataError(f"{path} cannot be read ({error}); it is missing or damaged: download it again")


def _check_names(files: TensorFiles, family: Family, model: ModelConfig, weights: list[StoredWeight]) -> None:
    """Raise DataError unless the files contain exactly the family's tensors."""
    expected = {weight.name for weight in weights}
    missing = sorted(expected - set(files))
    if missing:
        remedy = "download the missing files, or take the config.json that belongs to the weights"
        if missing == [family.head_name]:
            remedy += "; if the model uses its embedding as the head, set tie_word_embeddings to true in config.json"
        raise DataError(
            f"{files.folder} has no {_abbreviate(missing)} "
            f"({len(missing)} of the {len(expected)} tensors that a {family.name} of this config.json has are missing)"
            f"; {remedy}"
        )
    extra = sorted(name for name in files if name not in expected and not re.search(family.ignored_tensors, name))
    if model.tied_embeddings and family.head_name in extra:
        extra.remove(family.head_name)
    if extra:
        raise DataError(
            f"{files.folder} holds {_abbreviate(extra)} "
            f"({len(extra)} tensors) that a {family.name} of this config.json does not have; take the config.json that "
            f"belongs to the weights. {_explain_extra(extra)}".rstrip()
        )


def _explain_extra(names: list[str]) -> str:
    """Return the remedy for tensors that quantised weights have, or an empty string."""
    if any("scale" in name.rpartition(".")[2] for name in names):
        return f"Scales belong to quantised weights. {_CONVERSION_ADVICE}"
    return ""


def _name_type(code: str) -> str:
    """Return torch's name of a type that safetensors calls `code`, such as BF16."""
    letters = code.rstrip("0123456789")
    return _TYPE_PREFIXES.get(letters, letters) + code[len(letters) :]


def _check_tied_head(files: TensorFiles, head: str, embedding: str) -> None:
    """Raise DataError unless the stored head equals the embedding, which the model uses in its place."""
    row_count = files[embedding].shape[0]
    max_row_bytes = 8 * prod(files[embedding].shape[1:])  # float64, the widest type, has 8 bytes per element
    rows_per_read = max(1, _COMPARED_BYTES // max(1, max_row_bytes))
    are_equal = files[head].shape == files[embedding].shape
    for start in range(0, row_count, rows_per_read):
        if not are_equal:
            break
        stop = start + rows_per_read
        are_equal = files.read_rows(head, start, stop).equal(files.read_rows(embedding, start, stop))
    if not are_equal:
        raise DataError(
            f"{files.folder}: tie_word_embeddings is true, but {head} differs from {embedding}; set "
            "tie_word_embeddings to false in config.json if the logits have weights of their own"
        )


def _abbreviate(names: list[str]) -> str:
    """Return the first names of a list for an error message."""
    text = ", ".join(names[:_MAX_SHOWN_NAMES])
    if len(names) > _MAX_SHOWN_NAMES:
        text += " ..."
    return text


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return a JSON object. Raises DataError, with the remedy `hint` if the file does not exist."""
    try:
        record = strict_json.loads(read_bounded(path, _MAX_JSON_BYTES), _MAX_JSON_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {hint}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{path} is not a JSON object, so it is not the configuration of a model")
    return record
