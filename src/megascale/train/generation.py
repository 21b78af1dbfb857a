"""Text generation, token by token, with a cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale.config import ModelConfig
from megascale.data.tokenizer.base import Tokenizer
from megascale.errors import ConfigError, DataError
from megascale.model.context import ForwardContext, KVCache
from megascale.model.transformer import Chunk
from megascale.parallel.collectives import Axis, all_reduce


@dataclass(frozen=True)
class Sampling:
    """Rules for drawing the next token.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token each time.
        top_k: draw among this many most likely tokens; 0: all.
        top_p: draw among the most likely tokens whose probabilities sum to this (nucleus sampling).
        repetition_penalty: a token that has occurred before gets its logit divided by the penalty if the logit is
            positive, else multiplied (Keskar et al. 2019); 1 has no effect.
        seed: the same seed gives the same text.

    Raises ConfigError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"--temperature={self.temperature} is not a number of at least 0; try 0.8")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"--top-p={self.top_p} is not between 0 and 1; try 0.9")
        if self.top_k < 0:
            raise ConfigError(f"--top-k={self.top_k} is negative; try 50, or 0 to draw among all tokens")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ConfigError(f"--repetition-penalty={self.repetition_penalty} is not a positive number; try 1.1")


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [vocab]. Raises DataError for logits that are NaN or infinite."""
    if not logits.isfinite().all():
        raise DataError(
            "the model's logits are NaN or infinite, so its weights are unusable; load an earlier checkpoint with "
            "--step, or import the model again"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled_logits = logits.float() / sampling.temperature
    if not scaled_logits.isfinite().all():  # the quotient overflows, so the most likely token has probability 1
        return int(logits.argmax())
    logits = scaled_logits
    if sampling.top_k:
        smallest_kept = torch.topk(logits, min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    probabilities = torch.softmax(logits, -1)
    if sampling.top_p < 1:
        sorted_probabilities, token_ids = torch.sort(probabilities, descending=True)
        # Exclude a token if the tokens before it reach top_p. The most likely token always remains.
        sums_before = sorted_probabilities.cumsum(-1) - sorted_probabilities
        is_excluded = sums_before >= sampling.top_p
        is_excluded[0] = False
        probabilities[token_ids[is_excluded]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate_tokens(
    chunk: Chunk, prompt: Sequence[int], count: int, sampling: Sampling = Sampling(), *, ends: Collection[int] = ()
) -> Iterator[int]:
    """Yield up to `count` tokens that continue `prompt`.

    Args:
        chunk: the complete model as a single chunk. Its context ranks call this together, divide the prompt, and yield
            the same tokens.
        prompt: token ids, at least one.
        sampling: rules for drawing tokens.
        ends: ids of tokens that end the text. The first of them that is drawn ends the generation and is not yielded.

    A model with learned positions generates no token beyond model.sequence_length. Raises ConfigError if the prompt is
    empty, has a token outside the vocabulary, or leaves no learned position, and if the repetition penalty makes
    logits infinite.
    """
    model = chunk.model
    if model.positions == "learned":
        limit = model.sequence_length
    else:
        limit = None
    _check_prompt(prompt, model.vocab, limit)
    device = next(chunk.parameters()).device
    generator = torch.Generator(device=device)
    generator.manual_seed(sampling.seed)
    cache = KVCache()
    all_tokens = list(prompt)
    new_tokens = torch.tensor(prompt, dtype=torch.int64, device=device)  # tokens whose keys are not in the cache
    has_occurred = torch.zeros(model.vocab, dtype=torch.bool, device=device)
    penalty = sampling.repetition_penalty
    for _ in range(count):
        has_occurred[new_tokens] = True
        if chunk.changes_rotary_tables(cache.length, len(all_tokens)):
            # The cached keys have other rotary frequencies than the next ones. Compute the keys again.
            cache = KVCache()
            new_tokens = torch.tensor(all_tokens, dtype=torch.int64, device=device)
        with chunk.axis.runtime.kernels.as_current():
            hidden = _run_chunk(chunk, new_tokens, cache)
        logits = chunk.compute_logits(hidden[-1:])[0, 0]  # [vocab], of the last position
        if penalty != 1:
            logits = _penalise(logits, has_occurred, penalty)
        token = sample_token(logits, sampling, generator)
        if chunk.context_axis.size > 1:
            token = _agree_on_token(token, chunk.context_axis, device)
        if token in ends:
            return
        yield token
        all_tokens.append(token)
        if limit is not None and cache.length >= limit:
            return
        new_tokens = torch.tensor([token], dtype=torch.int64, device=device)


def _penalise(logits: torch.Tensor, has_occurred: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return the logits [vocab] with the penalty for tokens that have occurred.

    Raises ConfigError if the penalty makes finite logits infinite, for which `sample_token` would blame the weights.
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    result = torch.where(has_occurred, penalised, logits)
    if logits.isfinite().all() and not result.isfinite().all():
        raise ConfigError(f"--repetition-penalty={penalty} makes logits infinite; use a value near 1, such as 1.1")
    return result


def _agree_on_token(token: int, axis: Axis, device: torch.device) -> int:
    """Return the token of the axis's first rank. Other ranks may round logits differently and draw another token."""
    # The sum over the ranks is the first rank's token, because the others add 0.
    addend = torch.tensor(token if axis.rank == 0 else 0, device=device)
    return int(all_reduce(addend, axis).wait())


def _run_chunk(chunk: Chunk, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Add the tokens to the cache, and return the hidden states [s, 1, h] of the last s tokens, at least one.

    Each context rank runs an equal slice of the first tokens, and every rank runs the remaining ones, at least one. If
    the slices and the remaining tokens have different rotary tables (longrope), every rank runs all tokens.
    """
    axis = chunk.context_axis
    slice_length = 0
    if axis.size > 1:
        slice_length = (len(tokens) - 1) // axis.size  # - 1: at least one token remains
        if chunk.changes_rotary_tables(cache.length + axis.size * slice_length, cache.length + len(tokens)):
            slice_length = 0
    sliced_length = axis.size * slice_length
    if slice_length:
        start = axis.rank * slice_length
        chunk(tokens[start : start + slice_length, None], None, ForwardContext(cache=cache))
        cache.length += sliced_length
    remaining = tokens[sliced_length:]
    hidden: torch.Tensor = chunk(remaining[:, None], None, ForwardContext(cache=cache, is_replicated=True))
    cache.length += len(remaining)
    return hidden


def _check_prompt(prompt: Sequence[int], vocab: int, limit: int | None) -> None:
    """Raise ConfigError for a prompt that is empty, has tokens outside the vocabulary, or reaches the limit."""
    if not prompt:
        raise ConfigError("the prompt has no tokens; give at least one character, such as --prompt=def")
    for token in prompt:
        if not 0 <= token < vocab:
            raise ConfigError(
                f"the prompt has token {token} and model.vocab_size={vocab}; the tokenizer is another model's"
            )
    if limit is not None and len(prompt) >= limit:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model's learned positions end at model.sequence_length="
            f"{limit}; give a shorter prompt"
        )


def explain_length(prompt: Sequence[int], count: int, model: ModelConfig) -> str:
    """Return a note if a prompt is longer than the sequences of the training, or if `count` tokens do not follow it.

    The note is an empty string for other lengths, and for prompts that `generate_tokens` refuses.
    """
    if model.positions == "learned":
        possible_count = model.sequence_length - len(prompt) + 1  # the last token needs no position
        if not prompt or not 1 < possible_count < count:
            return ""
        return (
            f"the model's learned positions end at model.sequence_length={model.sequence_length:,}, so at most "
            f"{possible_count:,} of the {count:,} tokens follow the prompt"
        )
    if len(prompt) <= model.sequence_length:
        return ""
    return (
        f"the prompt has {len(prompt):,} tokens, more than model.sequence_length={model.sequence_length:,}: the model "
        "was not trained for later positions, and its text may be poor"
    )


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterable[int], stops: Sequence[str] = (), prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of a stream of tokens, in pieces that later tokens do not change.

    Args:
        stops: texts that end the stream. The text before the first of them is yielded, the stop itself is not.
        prompt: ids of the text before the stream, without additions of the tokenizer's template. Prompt and stream are
            decoded together, since a decoder may omit the blank before the first word of a text.
    """
    ids = list(prompt)
    prompt_text = tokenizer.decode(ids)
    yielded_length, text = 0, ""
    for token in tokens:
        ids.append(token)
        # A character may need several tokens. Until it is complete, it is decoded as U+FFFD.
        decoded = tokenizer.decode(ids).rstrip("\ufffd")
        text = decoded[_count_common_characters(prompt_text, decoded) :]
        stop_positions = [text.find(stop) for stop in stops if stop in text]
        if stop_positions:
            text = text[: min(stop_positions)]
            break
        final_length = len(text) - _count_possible_stop(text, stops)
        if final_length > yielded_length:
            yield text[yielded_length:final_length]
            yielded_length = final_length
    if len(text) > yielded_length:
        yield text[yielded_length:]


def _count_common_characters(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    if second.startswith(first):
        return len(first)
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return len(second)  # `second` is a prefix of `first`


def _count_possible_stop(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the text's end that may be the beginning of a stop."""
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest
