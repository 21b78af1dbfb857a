"""Text from a model: one token after another with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale.data.tokenizer.base import Tokenizer
from megascale.errors import ConfigError
from megascale.model.context import ForwardContext, KVCache
from megascale.model.transformer import Chunk


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among this many likeliest tokens; 0: all.
        top_p: draw among the likeliest tokens that have this chance together.
        repetition_penalty: logits of tokens that are there already are divided by it if positive, else multiplied
            (Keskar et al. 2019); 1 does nothing.
        seed: the same seed gives the same text.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        smallest = torch.topk(logits, min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    chances = torch.softmax(logits, -1)
    if sampling.top_p < 1:
        ordered, order = torch.sort(chances, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        beyond[0] = False
        chances[order[beyond]] = 0
    return int(torch.multinomial(chances, 1, generator=generator))


@torch.no_grad()
def generate_tokens(
    chunk: Chunk, prompt: Sequence[int], count: int, sampling: Sampling = Sampling(), *, ends: Collection[int] = ()
) -> Iterator[int]:
    """Yield up to `count` tokens that continue `prompt`.

    Args:
        chunk: the whole model (first and last chunk in one).
        prompt: token ids, at least one.
        ends: tokens that end the text, each alone.

    Raises ConfigError if the prompt is empty, holds a token that the model has not, or is as long as learned
    positions reach; with learned positions the text ends where they end.
    """
    model = chunk.model
    if not prompt:
        raise ConfigError("the prompt has no tokens; give at least one character, such as --prompt=def")
    foreign = next((token for token in prompt if not 0 <= token < model.vocab), None)
    if foreign is not None:
        raise ConfigError(
            f"the prompt has token {foreign} and model.vocab_size={model.vocab}; the tokenizer is another model's"
        )
    limit = model.sequence_length if model.positions == "learned" else None
    if limit is not None and len(prompt) >= limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model's learned positions end at model.sequence_length="
            f"{limit}; give a shorter prompt"
        )
    device = next(chunk.parameters()).device
    generator = torch.Generator(device=device)
    generator.manual_seed(sampling.seed)
    cache = KVCache()
    fresh = torch.tensor(prompt, dtype=torch.int64, device=device)
    seen = torch.zeros(model.vocab, dtype=torch.bool, device=device)
    for _ in range(count):
        seen[fresh] = True
        with chunk.axis.runtime.kernels.as_current():
            hidden = chunk(fresh[:, None], None, ForwardContext(cache=cache))
        cache.length += len(fresh)
        logits = chunk.logits(hidden[-1:])[0, 0]
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        token = sample_token(logits, sampling, generator)
        if token in ends:
            return
        yield token
        if limit is not None and cache.length >= limit:
            return
        fresh = torch.tensor([token], dtype=torch.int64, device=device)


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterable[int], stops: Sequence[str] = (), prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of a stream of tokens, piece by piece, up to the first of the texts `stops` (not shown).

    Args:
        prompt: ids of the text before the stream, without what the tokenizer's template adds. Both are decoded
            together, since a decoder may leave out the blank before the first word of a text.
    """
    ids = list(prompt)
    before = tokenizer.decode(ids)
    shown, text = 0, ""
    for token in tokens:
        ids.append(token)
        # A character may need several tokens; it is shown once it is whole.
        whole = tokenizer.decode(ids).rstrip("\ufffd")
        text = whole[_common_length(before, whole) :]
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            text = text[: min(found)]
            break
        safe = len(text) - _held_back(text, stops)
        if safe > shown:
            yield text[shown:safe]
            shown = safe
    if len(text) > shown:
        yield text[shown:]


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    if second.startswith(first):
        return len(first)
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the text's end that may be the beginning of a stop."""
    sizes = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)
