"""The text of generated tokens: whole words of every kind of tokenizer, and where it ends."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megascale import api
from megascale.config import ModelConfig
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import HuggingFaceTokenizer
from megascale.errors import ConfigError, DataError
from megascale.train.generation import Sampling, _penalise, decode_stream, explain_length, sample_token

TEXT = "people like green people and green people like naïve 中文"
SPECIAL = ["<unk>", "<s>", "</s>"]
KINDS = ["llama", "metaspace first", "metaspace always", "unigram", "wordpiece", "suffix", "bytes"]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return a small tokenizer of a published kind, trained on TEXT."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    library = Library(models.BPE(unk_token="<unk>", byte_fallback=kind == "llama"))
    if kind == "llama":  # Llama 2, Mistral, TinyLlama: no pre-tokenizer, and a decoder that strips one blank
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        library.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif kind.startswith("metaspace"):
        scheme = kind.split()[1]
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    elif kind == "unigram":  # T5
        library = Library(models.Unigram())
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    elif kind == "wordpiece":  # BERT
        library = Library(models.WordPiece(unk_token="<unk>"))
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    elif kind == "suffix":  # GPT-1, CLIP
        library = Library(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        library.decoder = decoders.BPEDecoder()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
        )
    else:  # GPT-2
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    library.train_from_iterator([TEXT] * 4, trainer)
    if kind == "llama":
        library.pre_tokenizer = None
    return HuggingFaceTokenizer.from_json(library.to_str(), "</s>", kind)


def generated(kind: str, prompt: str, stops: list[str]) -> str:
    """Return what is shown of the rest of TEXT as a model would generate it after `prompt`."""
    tokenizer = tokenizer_of(kind)
    ids, begun = tokenizer.encode(TEXT), tokenizer.encode(prompt)
    assert ids[: len(begun)] == begun
    pieces = list(decode_stream(tokenizer, ids[len(begun) :], stops, begun))
    assert all(pieces)
    return "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_are_the_text(kind):
    arguments = TEXT.split(" ")
    for count in range(len(arguments)):
        prompt = " ".join(arguments[:count])
        assert prompt + generated(kind, prompt, []) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_that_begins_with_a_blank_is_seen_at_the_first_word(kind):
    assert generated(kind, "people like green", [" people"]) == ""
    assert generated(kind, "people like", [" people", "zebra"]) == " green"
    assert generated(kind, "people", ["like"]) == " "


def test_an_empty_stop_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--stop is an empty text"):
        next(api.generate(tmp_path, "def", stop=["end", ""]))


def test_logits_that_are_not_numbers_end_the_text_with_a_reason():
    generator = torch.Generator().manual_seed(1)
    for value in (torch.nan, torch.inf):
        logits = torch.tensor([0.0, value, 1.0])
        for temperature in (0.0, 0.8):
            with pytest.raises(DataError, match="logits are NaN or infinite"):
                sample_token(logits, Sampling(temperature), generator)


def test_a_temperature_near_zero_takes_the_most_likely_token():
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([1.0, 3.0, 2.0])
    for temperature in (1e-6, 1e-30, 1e-42, 1e-300):
        assert sample_token(logits, Sampling(temperature), generator) == 1


@pytest.mark.parametrize(
    "values",
    [{"temperature": math.nan}, {"temperature": -1.0}, {"top_p": math.nan}, {"top_p": 1.5}, {"top_k": -1}]
    + [{"repetition_penalty": value} for value in (0.0, math.nan, math.inf)],
)
def test_sampling_out_of_range_is_refused(values):
    [name] = values
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}="):
        Sampling(**values)


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e300])
def test_a_penalty_that_makes_logits_infinite_is_named(penalty):
    """The weights are fine, so the error is not about them. Logits that were infinite before keep their reason."""
    has_occurred = torch.tensor([True, True, False])
    logits = torch.tensor([3.0, -2.0, 1.0])
    with pytest.raises(ConfigError, match=r"--repetition-penalty=.* use a value near 1, such as 1\.1"):
        _penalise(logits, has_occurred, penalty)
    infinite = _penalise(torch.tensor([torch.inf, 1.0, 1.0]), has_occurred, penalty)
    with pytest.raises(DataError, match="weights are unusable"):
        sample_token(infinite, Sampling(), torch.Generator())
    torch.testing.assert_close(_penalise(logits, has_occurred, 2.0), torch.tensor([1.5, -4.0, 1.0]))


def test_a_prompt_beyond_the_trained_positions_gets_a_note():
    rotary = ModelConfig(sequence_length=4, positions="rotary")
    assert explain_length([1] * 4, 9, rotary) == ""
    assert "5 tokens, more than model.sequence_length=4" in explain_length([1] * 5, 9, rotary)
    learned = ModelConfig(sequence_length=4, positions="learned")
    assert explain_length([1] * 2, 3, learned) == ""
    assert "end at model.sequence_length=4, so at most 3 of the 4 tokens follow" in explain_length([1] * 2, 4, learned)
    for refused_length in (0, 4):  # errors of `generate_tokens`
        assert explain_length([1] * refused_length, 9, learned) == ""
