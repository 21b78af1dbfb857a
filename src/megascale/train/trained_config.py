"""What the checkpoints of a run were trained with: configuration, tokenizer, and hashes of the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.checkpoint import setting_changes
from megascale.checkpoint.base_model import open_base
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config
from megascale.data.dataset import data_checks, tokenizer_agreement
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_run_tokenizer
from megascale.errors import ConfigError, DataError
from megascale.train.run_folder import find_checkpoints, load_run_config, resolve_paths
from megascale.train.run_tokenizer import find_tokenizer

if TYPE_CHECKING:
    from megascale.checkpoint.loader import AcceptState


def locate_checkpoints(path: str) -> Path | str:
    """Return the folder or URL of the checkpoints of a run folder; any other path is returned unchanged."""
    if "://" not in path and (Path(path) / "config.toml").exists():
        return find_checkpoints(Path(path), load_run_config(Path(path)))
    return path


def adopt_model(config: Config) -> Config:
    """Return a configuration with [model] taken from checkpoint.start_from, except for keys set explicitly.

    Raises DataError if that run has no checkpoint.
    """
    section = config.checkpoint
    if section.start_from is None:
        return config
    if section.resume and (config.run_folder / "config.toml").exists():
        # A run that has started has the model in its config.toml, and the run of start_from may have been removed.
        model = load_run_config(config.run_folder).model
    else:
        _, source = open_base(locate_checkpoints(section.start_from), section.start_step, "checkpoint.start_from")
        saved_settings = source.state.get("config")
        if not isinstance(saved_settings, Mapping):
            return config
        saved, _ = setting_changes.read_saved_config(saved_settings)
        model = saved.model
    explicit_keys = config.model.model_fields_set
    # Leave out preset: validating it would overwrite the base's values.
    values = {**model.model_dump(exclude={"preset"}), **config.model.model_dump(include=explicit_keys)}
    try:
        adopted = type(model).model_validate(values)
    except ValueError as error:
        raise ConfigError(
            f"[model] does not fit the model of checkpoint.start_from={section.start_from}: {error}"
        ) from None
    return config.model_copy(update={"model": adopted})


def load_trained_config(run: Path, step: int | None = None) -> tuple[Config, AcceptState]:
    """Return the configuration that a checkpoint was trained with, and a function that checks a state to load.

    Model, precision and train.lora come from the checkpoint, other settings from config.toml. The data section is
    config.toml's, unless only the checkpoint's names the tokenizer that the checkpoint was trained with. The function
    raises DataError if another state, such as that of a newer step, has a different model.

    Args:
        step: step of the checkpoint; default: the newest.
    """
    config = load_run_config(run)
    saved_state = _read_state(run, config, step)
    saved_settings = saved_state.get("config")
    if not isinstance(saved_settings, Mapping):
        return config, lambda state, name: False  # accepts any state, and keeps the optimizer state
    parsed, _ = setting_changes.read_saved_config(saved_settings)
    saved = resolve_paths(parsed, run)
    sha256 = saved_state.get("tokenizer")
    data = config.data
    if sha256 is not None and hash_tokenizer(config) != sha256 and hash_tokenizer(saved) == sha256:
        data = saved.data
    train = config.train.model_copy(update={"precision": saved.train.precision, "lora": saved.train.lora})
    config = config.model_copy(update={"model": saved.model, "train": train, "data": data})

    def accept(state: Mapping[str, Any], name: str) -> bool:
        state_settings = state.get("config")
        if isinstance(state_settings, Mapping):
            saved_config, _ = setting_changes.read_saved_config(state_settings)
            changes = setting_changes.find_changes(saved_config, config, has_trained=False)
            refused = [change for change in changes if change.kind == "refused"]
            problem = setting_changes.explain_changes(name, refused, ())
            if problem:
                raise DataError(f"{problem} (--step chooses a checkpoint)")
        return False

    return config, accept


def _read_state(run: Path, config: Config, step: int | None) -> Mapping[str, Any]:
    """Return the state that was saved with the checkpoint of `step`, by default the newest; empty without one."""
    commits, _ = step_folders.list_commits(open_storage(find_checkpoints(run, config)))
    for commit in commits:
        if step in (None, commit.step):
            return commit.state
    return {}


def load_trained_tokenizer(run: Path, config: Config, step: int | None = None) -> tuple[Path, Tokenizer]:
    """Return the tokenizer that the checkpoint of `step` (default: the newest) was trained with, and its file.

    Raises DataError or ConfigError, as `find_tokenizer`.
    """
    return find_tokenizer(run, config, read_tokenizer_hash(run, config, step))


def read_tokenizer_hash(run: Path, config: Config, step: int | None = None) -> str | None:
    """Return the SHA-256 of the tokenizer that a checkpoint was trained with, or None if it is unknown."""
    sha256 = _read_state(run, config, step).get("tokenizer")
    if sha256 is not None:
        return str(sha256)
    recorded = tokenizer_agreement.read_identity(run)
    return recorded.sha256 if recorded is not None else None


def collect_hashes(config: Config) -> dict[str, Any]:
    """Return the hashes that a checkpoint holds: of the data files ("data") and of the tokenizer ("tokenizer")."""
    data_hash = hash_fingerprints(data_checks.fingerprint_sources(config.data).values())
    return {"data": data_hash, "tokenizer": hash_tokenizer(config)}


def hash_fingerprints(fingerprints: Iterable[str]) -> str:
    """Return a hash of the data files' fingerprints, which depends on their order."""
    return hashlib.blake2b(json.dumps(list(fingerprints)).encode(), digest_size=16).hexdigest()


def hash_tokenizer(config: Config) -> str | None:
    """Return the SHA-256 of the tokenizer of a configuration, or None if it cannot be read."""
    try:
        return load_run_tokenizer(config.data).sha256
    except (ConfigError, DataError):
        return None
