"""Choice of the systems that can train a configuration (peer_comparison.py), and of their float8 recipes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.config import Config

OURS = "megascale"
# Package of each peer, and the module that runs it.
PEERS = {
    "torchtitan": ("torchtitan", "benchmarks.training.peer_torchtitan"),
    "megatron-core": ("megatron.core", "benchmarks.training.peer_megatron"),
}
# Float8 recipes of each peer, the fastest known first.
FLOAT8 = {"torchtitan": ("tensorwise", "rowwise"), "megatron-core": ("delayed", "tensorwise")}


def check_peers_of_shapes(file: Path, trainers: Sequence[str]) -> None:
    """Raise ConfigError if a peer cannot train a shape of a file, before anything is measured."""
    from benchmarks.training.shape_file import load_shapes

    for shape in load_shapes(file):
        for trainer in trainers:
            if trainer != "megatron-core":
                raise ConfigError(f"--peer={trainer}: shapes of a file are trained by megatron-core only")
            if not shape.list_peer_runs(trainer):
                continue
            obstacle = find_obstacle(trainer, shape.load_config())
            if obstacle:
                raise ConfigError(f"shape {shape.name}: {trainer} cannot train it: {obstacle}")


def choose_recipe(name: str, config: Config, requested: str) -> str:
    """Return the float8 recipe that a peer trains with, "" for none; `requested` is --peer-float8."""
    from megascale.config.parts import LINEAR_PRECISIONS

    if requested == "auto":
        if LINEAR_PRECISIONS[config.train.linear_precision].float8_gemms != "none":
            return FLOAT8[name][0]
        return ""
    return "" if requested == "none" else requested


def choose_peers(requested: list[str], config: Config, float8: str = "auto") -> tuple[list[str], dict[str, str]]:
    """Return the peers to run, and the obstacles of other peers. Raise ConfigError for a requested peer with one."""
    unknown = set(requested) - set(PEERS)
    if unknown:
        raise ConfigError(f"--peer={unknown.pop()}: there are {', '.join(PEERS)}")
    recipes = {"auto", "none"}.union(*FLOAT8.values())
    if float8 not in recipes:
        raise ConfigError(f"--peer-float8={float8}: there are {', '.join(sorted(recipes))}")
    chosen = []
    obstacles = {}
    for name in requested or PEERS:
        recipe = choose_recipe(name, config, float8)
        obstacle = find_obstacle(name, config) or _find_float8_obstacle(name, recipe)
        if not obstacle:
            chosen.append(name)
        elif requested:
            raise ConfigError(f"--peer={name}: {obstacle}")
        else:
            obstacles[name] = obstacle
    return chosen, obstacles


def list_contestants(chosen: list[str], obstacles: dict[str, str], peers_only: bool) -> list[str]:
    """Return the trainers of a turn, given the result of `choose_peers`. Raise ConfigError without a trainer."""
    if not peers_only:
        return [OURS, *chosen]
    if not chosen:
        reasons = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        raise ConfigError(f"--peers-only: no peer can train this ({reasons}); install one, or omit --peers-only")
    return chosen


def find_obstacle(name: str, config: Config) -> str:
    """Return why a peer cannot train a configuration, "" if it can."""
    package, _ = PEERS[name]
    try:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    except ModuleNotFoundError:
        return f"the package {package} is not installed"
    model = config.model
    if model.block == "parallel" or model.window is not None:
        return "it has no parallel block and no sliding window; compare with --model.block=serial and no window"
    settings = model.experts
    has_experts = model.mlp == "experts"
    if has_experts and name == "torchtitan":
        return "its experts are not set up here; compare with megatron-core"
    if has_experts and importlib.util.find_spec("transformer_engine") is None:
        return "its grouped GEMMs need the package transformer_engine, which is not installed"
    if has_experts and settings and (settings.biases or settings.shared_width or settings.dense_layers):
        return "its experts are compared without biases, shared experts and dense layers"
    allowed_norms = ("none", "head") if name == "megatron-core" else ("none",)
    lacks_norms = model.qk_norm not in allowed_norms or model.norm_placement != "pre"
    if model.layer_kinds or lacks_norms or model.rotary_scaling is not None:
        return (
            "its layers are alike; leave out model.layer_kinds, model.qk_norm, model.norm_placement and "
            "model.rotary_scaling"
        )
    is_llama = (model.norm, model.activation, model.positions) == ("rmsnorm", "swiglu", "rotary")
    has_biases = model.attention_bias or model.mlp_bias
    if name == "torchtitan" and (not is_llama or has_biases or model.tied_embeddings):
        return "it trains Llama shapes only (RMSNorm, SwiGLU, rotary positions, no biases, untied embeddings)"
    if name == "megatron-core" and model.attention_bias != model.mlp_bias:
        return "it has biases in all linear layers or in none"
    if config.parallel.context > 1 and name == "torchtitan":
        return "its context parallelism is not set up here; compare with --parallel.context=1"
    if config.parallel.context > 1 and importlib.util.find_spec("transformer_engine") is None:
        return "its context parallelism needs the package transformer_engine, which is not installed"
    if config.optimizer.name != "adamw":
        return "its optimizer is AdamW; compare with --optimizer.name=adamw"
    return ""


def _find_float8_obstacle(name: str, recipe: str) -> str:
    """Return why a peer cannot train with this recipe, "" if it can."""
    if not recipe:
        return ""
    if recipe not in FLOAT8[name]:
        return f"it has no float8 recipe {recipe}, but {', '.join(FLOAT8[name])} (--peer-float8)"
    package = {"torchtitan": "torchao", "megatron-core": "transformer_engine"}[name]
    if importlib.util.find_spec(package) is None:
        return f"its float8 needs the package {package}, which is not installed"
    return ""
