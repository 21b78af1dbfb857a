"""Text from a model: one token after another with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megascale.errors import ConfigError
from megascale.model.transformer import Chunk, KVCache, Step


def pick(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw a token from logits [vocab]; temperature 0 takes the likeliest."""
    if temperature <= 0:
        return int(logits.argmax())
    logits = logits.float() / temperature
    if top_k:
        smallest = torch.topk(logits, min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    chances = torch.softmax(logits, -1)
    if top_p < 1:
        ordered, order = torch.sort(chances, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        chances[order[beyond]] = 0
    return int(torch.multinomial(chances, 1, generator=generator))


@torch.no_grad()
def generate_tokens(
    chunk: Chunk,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `count` tokens that continue `prompt`.

    Args:
        chunk: the whole model (first and last chunk in one).
        prompt: token ids, at least one.
        stop: a token that ends the text.
    Raises ConfigError if the prompt is empty or as long as learned positions reach; with learned positions the
    text ends where they end.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens; give at least one character, such as --prompt='def '")
    limit = chunk.model.sequence_length if chunk.model.positions == "learned" else None
    if limit is not None and len(prompt) >= limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model's learned positions end at model.sequence_length="
            f"{limit}; give a shorter prompt"
        )
    device = next(chunk.parameters()).device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    cache = KVCache()
    fresh = torch.tensor(prompt, dtype=torch.int64, device=device)
    for _ in range(count):
        hidden = chunk(fresh[:, None], None, Step(cache=cache))
        cache.length += len(fresh)
        token = pick(chunk.logits(hidden[-1:])[0, 0], temperature, top_k, top_p, generator)
        if token == stop:
            return
        yield token
        if limit is not None and cache.length >= limit:
            return
        fresh = torch.tensor([token], dtype=torch.int64, device=device)
