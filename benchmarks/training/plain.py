"""A GPT in plain PyTorch, trained as `megascale train` would be: the same first weights, samples and schedule.

What training must come to if nothing in it is wrong, written as a textbook would: torch's modules, attention and AdamW,
float32 weights, autocast for bfloat16. `benchmarks convergence --variant plain` draws it next to ours. For shapes
such as GPT-2's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megascale.config import Config, ModelConfig, load
from megascale.core import strict_json
from megascale.data.dataset.held_out import IGNORE, HeldOut
from megascale.data.dataset.samples import SampleSource
from megascale.errors import ConfigError, MegascaleError
from megascale.ops.attention_backends import make_causal_mask
from megascale.optim.learning_rate import compute_learning_rate
from megascale.parallel.parameters import draw_initial_values

# Settings of the model below. Other values have no plain model here.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model.norm": ("layernorm",),
    "model.positions": ("learned",),
    "model.activation": ("gelu", "gelu_tanh"),
    "model.dropout": (0.0,),
    "model.attention_bias": (True,),
    "model.mlp_bias": (True,),
    "model.head_bias": (False,),
    "model.parallel_norms": (1,),
    "model.layer_pattern": ("S",),
    "model.layer_kinds": ({},),
    "model.qk_norm": ("none",),
    "model.norm_placement": ("pre",),
    "model.rotary_scaling": (None,),
    "optimizer.name": ("adamw",),
    "train.precision": ("float32", "bfloat16"),
}


class PlainBlock(nn.Module):
    """One layer; submodules have the names of the logical tensors (core/tensors.py)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        h, self.model = model.hidden, model
        self.norm1 = nn.LayerNorm(h, model.norm_eps)
        if model.block == "serial":
            self.norm2 = nn.LayerNorm(h, model.norm_eps)
        self.attention = nn.ModuleDict({name: nn.Linear(h, h) for name in ("query", "key", "value", "output")})
        self.mlp = nn.ModuleDict({"in": nn.Linear(h, model.ffn), "out": nn.Linear(model.ffn, h)})

    def _attend(self, x_BSH: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            self.attention[name](x_BSH).unflatten(-1, (self.model.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.attention["output"](out.transpose(1, 2).flatten(2))

    def _mlp(self, x_BSH: Tensor) -> Tensor:
        if self.model.activation == "gelu_tanh":
            approximate = "tanh"
        else:
            approximate = "none"
        return self.mlp["out"](F.gelu(self.mlp["in"](x_BSH), approximate=approximate))

    def forward(self, x_BSH: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        if self.model.block == "parallel":
            normed = self.norm1(x_BSH)
            return x_BSH + self._attend(normed, mask) + self._mlp(normed)
        x_BSH = x_BSH + self._attend(self.norm1(x_BSH), mask)
        return x_BSH + self._mlp(self.norm2(x_BSH))


class PlainGPT(nn.Module):
    """Tokens to the sum of their losses."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.vocab_size is not None
        h, self.model = model.hidden, model
        self.embedding = nn.Module()
        self.embedding.token = token = nn.Embedding(model.vocab_size, h)
        self.embedding.position = position = nn.Embedding(model.sequence_length, h)
        self.layers = nn.ModuleList(PlainBlock(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(h, model.norm_eps)
        if model.tied_embeddings:
            self.head = None
        else:
            self.head = nn.Linear(h, model.vocab_size, bias=False)
        self._tables = (token, position)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Sum over the targets that are not IGNORE, nats."""
        S = tokens_BS.shape[1]
        token, position = self._tables
        x = token(tokens_BS) + position.weight[:S]
        window = self.model.window
        if window is None or window >= S:
            mask = None
        else:
            mask = make_causal_mask(S, S, window, x.device)
        for layer in self.layers:
            x = layer(x, mask)
        if self.head is None:
            table = token.weight
        else:
            table = self.head.weight
        logits = F.linear(self.norm(x), table).float()
        return F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten(), reduction="sum", ignore_index=IGNORE)


@torch.no_grad()
def initialise(plain: PlainGPT, seed: int) -> None:
    """The weights that our model of that seed begins with, drawn on the device they are on."""
    model = plain.model
    for name, p in plain.named_parameters():
        if p.dim() == 1:
            p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        into_stream = name.endswith(("attention.output.weight", "mlp.out.weight"))
        if into_stream:
            std = model.init_std / (2 * model.layers) ** 0.5
        else:
            std = model.init_std
        p.copy_(draw_initial_values(seed, name, tuple(p.shape), std, p.device))


def check(config: Config) -> None:
    """ConfigError for what the plain model does not have."""
    tree = config.model_dump()
    for key, expected in SUPPORTED.items():
        section, name = key.split(".")
        if tree[section][name] not in expected:
            raise ConfigError(f"the plain model knows {key}={expected[0]!r} only, not {tree[section][name]!r}")
    model = config.model
    if model.num_kv_heads != model.heads or model.head_size * model.heads != model.hidden:
        raise ConfigError("the plain model has as many key heads as query heads, and heads that fill model.hidden")


def train(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of metrics.jsonl: a line a step, and the held-out loss where train.eval_interval asks and at the end."""
    check(config)
    torch.set_float32_matmul_precision("highest")
    size = config.train.micro_batch
    batch = config.train.global_batch
    length = config.model.sequence_length
    plain = PlainGPT(config.model).to(device)
    initialise(plain, config.train.seed)
    if device.type == "cuda":
        run = torch.compile(plain, dynamic=False)
    else:
        run = plain
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    report = config.optimizer
    groups = [
        {"params": matrices, "weight_decay": report.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(report.beta1, report.beta2), eps=report.eps)
    source = SampleSource(
        config.data, config.model.sequence_length, vocab_size=config.model.vocab_size, seed=config.train.seed
    )
    if config.data.valid:
        held_out = HeldOut(config.data.valid, length, config.model.vocab_size)
    else:
        held_out = None
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bfloat16")

    def evaluate(samples: int | None) -> float:
        assert held_out is not None
        chosen, total = held_out.spread_windows(samples), torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(chosen), size):
            rows = held_out.read_windows(chosen[start : start + size], size)
            with torch.no_grad(), autocast:
                total += run(*(torch.from_numpy(x).to(device) for x in rows))
        return float(total) / held_out.count_targets(chosen)

    for step in range(1, config.train.steps + 1):
        began, loss = time.perf_counter(), torch.zeros((), device=device)
        for first in range((step - 1) * batch, step * batch, size):
            rows = torch.from_numpy(source.read_tokens(first, size)).to(device)
            with autocast:
                part = run(rows[:, :-1], rows[:, 1:]) / (batch * length)
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), report.clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(config.lr, step, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        tokens = step * batch * length
        record = {"step": step, "time": time.time(), "tokens": tokens, "loss": float(loss), "grad_norm": float(norm)}
        yield record | {"tokens_per_second": batch * length / (time.perf_counter() - began)}
        every = config.train.eval_interval
        last = step == config.train.steps
        if held_out is not None and (last or (every and step % every == 0)):
            result = evaluate(None if last else config.train.eval_samples)
            yield {"step": step, "time": time.time(), "tokens": tokens, "valid_loss": result}


def main(arguments: list[str]) -> None:
    """Train as `megascale train FILE --section.key=value ...` in one process. Leave a finished run as it is."""
    from megascale import api

    config = api.resolve(load(Path(arguments[0]), arguments[1:]))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    name = config.train.device if config.train.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(config.train.runs) / config.train.name
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "metrics.jsonl"
    if written.exists():
        lines = written.read_text().splitlines()
        if lines and "valid_loss" in (last := json.loads(lines[-1])) and last["step"] == config.train.steps:
            return
    with open(written, "w") as sink:
        for record in train(config, torch.device(name)):
            print(strict_json.dumps(record), file=sink, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MegascaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
