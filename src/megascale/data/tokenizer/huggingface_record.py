"""What the contents of a tokenizer.json mean for text: which tokens it may become, and whether some of it is lost."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

# Steps of normalisation that may change characters and drop none but white space. Others are taken to drop some.
_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Strip", "ByteLevel", "Precompiled"}


def protect_special_tokens(record: dict[str, Any], ids: Iterable[int]) -> dict[str, Any] | None:
    """Return contents of a tokenizer.json that gives the same ids, but none of `ids` for any text.

    A special token's name in a text is not matched as a whole, but a model that knows it as a piece, word or merge
    still makes the token of it. Such names are replaced by ones that no text has. Returns None if the contents are
    safe as they are.
    """
    model = record["model"]
    vocabulary = _vocabulary(model)
    protected = set(ids)
    names = {name for name, number in vocabulary.items() if number in protected}
    if model.get("type") == "BPE":
        names &= _made_by_bpe(model, names)
    added = record.get("added_tokens") or []
    plain = [token for token in added if token["id"] in protected and not token.get("special")]
    if not names and not plain:
        return None
    changed = copy.copy(record)
    placeholders = {name: f"\U0010fffe\x00{vocabulary[name]}\x00\U0010fffe" for name in names}
    changed["model"] = _renamed(model, placeholders)
    changed["added_tokens"] = [
        {
            **token,
            "content": placeholders.get(token["content"], token["content"]),
            "special": token.get("special") or token["id"] in protected,
        }
        for token in added
    ]
    return changed


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):
        return {name: number for number, (name, _) in enumerate(vocabulary)}
    return vocabulary


def _merge_names(merge: str | list[str], prefix: str) -> list[str]:
    """Return both parts of a merge and what it makes of them; older files write the parts as one string.

    `prefix` begins the names of tokens inside a word, so the second part loses it.
    """
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return [first, second, first + second.removeprefix(prefix)]


def _made_by_bpe(model: dict[str, Any], names: set[str]) -> set[str]:
    """Return those names that characters or merges may become; a word that is a token needs no merges if so set."""
    if model.get("ignore_merges"):
        return names
    prefix = model.get("continuing_subword_prefix") or ""
    made = {_merge_names(merge, prefix)[2] for merge in model.get("merges") or []}
    return {name for name in names if len(name) == 1 or name in made}


def _renamed(model: dict[str, Any], placeholders: dict[str, str]) -> dict[str, Any]:
    changed = dict(model)
    if isinstance(model.get("vocab"), list):
        changed["vocab"] = [[placeholders.get(name, name), score] for name, score in model["vocab"]]
    else:
        changed["vocab"] = {placeholders.get(name, name): number for name, number in model["vocab"].items()}
    if model.get("unk_token") in placeholders:
        changed["unk_token"] = placeholders[model["unk_token"]]
    if placeholders and model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        changed["merges"] = [
            merge for merge in model["merges"] if placeholders.keys().isdisjoint(_merge_names(merge, prefix))
        ]
    return changed


def is_byte_level(record: dict[str, Any]) -> bool:
    """Return whether each token of the model is written with one character per byte of UTF-8."""
    steps = [*_steps(record.get("pre_tokenizer"), "pretokenizers"), *_steps(record.get("normalizer"), "normalizers")]
    return record["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in steps)


def can_lose_text(record: dict[str, Any], byte_characters: Iterable[str]) -> bool:
    """Return whether some text has no tokens of its own: it becomes an unknown token, or is dropped.

    `byte_characters` are the characters that stand for the 256 bytes in byte-level vocabularies.
    """
    model, vocabulary = record["model"], _vocabulary(record["model"])
    if is_byte_level(record):
        complete = all(character in vocabulary for character in byte_characters)
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    removing = any(step.get("behavior") == "Removed" for step in _steps(record.get("pre_tokenizer"), "pretokenizers"))
    return not complete or removing or not all(map(_keeps_text, _steps(record.get("normalizer"), "normalizers")))


def _keeps_text(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return bool(step.get("content"))
    return step.get("type") in _KEEPING_NORMALIZERS


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps that a normalizer or pre-tokenizer consists of."""
    if not step:
        return []
    if step.get("type") == "Sequence":
        return [part for each in step.get(inner) or [] for part in _steps(each, inner)]
    return [step]


def unknown_id(record: dict[str, Any]) -> int | None:
    """Return the id of the token for what a model does not know, None if it has none."""
    model = record["model"]
    number = model.get("unk_id")
    return number if number is not None else _vocabulary(model).get(model.get("unk_token"))
