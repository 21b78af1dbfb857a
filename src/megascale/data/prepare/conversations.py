"""Conversations and prompt/completion pairs in JSON lines, as tokens with a loss weight each.

A line is an object of Hugging Face's form: `messages` (role and content of each), or `prompt` and `completion`, either
two texts or two lists of messages. The assistant's tokens and completions count in the loss, all others do not.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.chat_template import ChatTemplate, Message, RenderedChat, TemplateError
from megascale.errors import DataError

_BATCH = 512  # conversations passed to the tokenizer at a time
_MAX_FAULTS = 5  # named in one error


@dataclass(frozen=True)
class Line:
    """A line of an input file, and its number from 1."""

    file: Path
    number: int
    data: bytes

    def fault(self, key: str, problem: str) -> str:
        """Return a problem with file, line and key."""
        return f"{self.file}, line {self.number}, {key}: {problem}"


@dataclass(frozen=True)
class Conversation:
    """A record: messages of a chat template, or a prompt and its completion.

    Attributes:
        tools: the record's `tools`, which a template may describe.
        counted_from: number of the first message whose tokens may count.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    tools: Any = None
    counted_from: int = 0

    def texts(self) -> Iterator[str]:
        """Yield the contents that people and the assistant have written."""
        if not self.messages:
            yield self.prompt
            yield self.completion
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation, and the loss weight of each, 0 or 1."""

    tokens: NDArray[np.uint32]
    weights: NDArray[np.uint8]


class _RecordError(ValueError):
    """A record is unusable. `key`: what is wrong in it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def read_lines(files: Sequence[Path]) -> Iterator[Line]:
    """Yield the lines of JSON-lines files, plain or .gz, without empty ones. Raises DataError for unreadable files."""
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rb") as lines:
                for number, data in enumerate(lines, 1):
                    if data.strip():
                        yield Line(file, number, data)
        except OSError as error:
            raise DataError(f"--chat={file} cannot be read: {error.strerror or error}") from None


def parse_conversation(line: Line) -> Conversation:
    """Return the conversation of a line. Raises DataError with file, line and key for an unusable record."""
    try:
        return _parse_record(_parse_json(line.data))
    except _RecordError as error:
        raise DataError(line.fault(error.key, str(error))) from None


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _RecordError("the record", f"it is not JSON ({error}); write one object per line") from None
    if not isinstance(record, dict):
        raise _RecordError("the record", f"it is {_describe(record)}; write an object with the key messages")
    return record


def _parse_record(record: dict[str, Any]) -> Conversation:
    if "messages" in record:
        messages = _check_messages(record["messages"], "messages")
        return _require_answer(Conversation(messages, tools=record.get("tools")), "messages")
    for key in ("prompt", "completion"):
        if key not in record:
            keys = ", ".join(map(repr, record)) or "nothing"
            raise _RecordError(key, f"the key is missing; a record has messages, or prompt and completion, not {keys}")
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _check_messages(prompt, "prompt")
        after = _check_messages(completion, "completion")
        conversation = Conversation(before + after, tools=record.get("tools"), counted_from=len(before))
        return _require_answer(conversation, "completion")
    for key in ("prompt", "completion"):
        if not isinstance(record[key], str):
            raise _RecordError(key, f"it is {_describe(record[key])}; write a text in both, or messages in both")
    if not completion:
        raise _RecordError("completion", "it is empty, so no token would count; write an answer, or leave it out")
    return Conversation(prompt=prompt, completion=completion)


def _check_messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _RecordError(key, f"it is {_describe(value)}; write a list of messages, each with role and content")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise _RecordError(f"{key}[{index}]", f"it is {_describe(message)}; write an object with role and content")
        if not isinstance(message.get("role"), str):
            role = _describe(message.get("role"))
            raise _RecordError(f"{key}[{index}].role", f"it is {role}; write a role such as user or assistant")
        content = message.get("content")
        is_text = isinstance(content, str) or (isinstance(content, list) and content)
        if not is_text and not message.get("tool_calls"):
            raise _RecordError(f"{key}[{index}].content", f"it is {_describe(content)}; write a text")
    return tuple(value)


def _require_answer(conversation: Conversation, key: str) -> Conversation:
    roles = [message["role"] for message in conversation.messages[conversation.counted_from :]]
    if "assistant" not in roles:
        raise _RecordError(key, "no message has the role assistant, so no token would count; add one, or leave it out")
    return conversation


def _describe(value: Any) -> str:
    if value is None:
        return "missing or null"
    if value in ("", [], {}):
        return "empty"
    return f"of type {type(value).__name__}"


def encode_lines(
    lines: Iterable[Line], tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[tuple[Line, Conversation, EncodedConversation]]:
    """Yield each line with its conversation and tokens.

    Args:
        template: renders messages; None allows prompt/completion pairs of text only.

    Raises DataError that names file, line and key of unusable records: all of a batch, up to five.
    """
    batch: list[tuple[Line, Conversation]] = []
    faults: list[str] = []
    for line in lines:
        try:
            batch.append((line, parse_conversation(line)))
        except DataError as error:
            faults.append(str(error))
        if len(batch) + len(faults) >= _BATCH or len(faults) >= _MAX_FAULTS:
            yield from _encode_batch(batch, tokenizer, template, faults)
            batch.clear()
    yield from _encode_batch(batch, tokenizer, template, faults)


def _encode_batch(
    batch: Sequence[tuple[Line, Conversation]], tokenizer: Tokenizer, template: ChatTemplate | None, faults: list[str]
) -> Iterator[tuple[Line, Conversation, EncodedConversation]]:
    """Yield the batch encoded, unless records have faults, here or before."""
    chats: list[RenderedChat | None] = []
    for line, conversation in batch:
        chats.append(None)
        if not conversation.messages:
            continue
        if template is None:
            faults.append(line.fault("messages", "there is no chat template; name one with --chat-template=FILE.jinja"))
            continue
        try:
            chats[-1] = render_conversation(conversation, template)
        except TemplateError as error:
            faults.append(line.fault("messages", str(error)))
    if faults:
        listing = "\n".join(faults[:_MAX_FAULTS])
        more = f"\nand {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise DataError(f"{listing}{more}\nCorrect these records, or remove them")
    rendered = [chat for chat in chats if chat is not None]
    encodings = iter(tokenizer.encode_markup([chat.text for chat in rendered])) if rendered else iter(())
    for (line, conversation), chat in zip(batch, chats, strict=True):
        if chat is None:
            encoded = _encode_pair(conversation, tokenizer)
        else:
            ids, offsets = next(encodings)
            encoded = EncodedConversation(np.array(ids, np.uint32), weigh_tokens(offsets, chat.spans))
        if not encoded.weights.any():
            raise DataError(line.fault("messages", "the assistant's messages have no tokens; write an answer"))
        yield line, conversation, encoded


def render_conversation(conversation: Conversation, template: ChatTemplate) -> RenderedChat:
    """Return the text of a conversation with the ranges that count. Raises TemplateError as `ChatTemplate.render`."""
    chat = template.render(conversation.messages, conversation.tools)
    if not conversation.counted_from:
        return chat
    prompt = conversation.messages[: conversation.counted_from]
    start = len(template.render_text(prompt, tools=conversation.tools))
    return RenderedChat(chat.text, tuple(span for span in chat.spans if span[1] > start))


def weigh_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """Return weight 1 for tokens whose characters [start, stop) overlap one of the spans, 0 for others."""
    ranges = np.array(offsets, np.int64).reshape(-1, 2)
    weights = np.zeros(len(ranges), np.uint8)
    for start, stop in spans:
        weights[(ranges[:, 0] < stop) & (ranges[:, 1] > start)] = 1
    return weights


def _encode_pair(conversation: Conversation, tokenizer: Tokenizer) -> EncodedConversation:
    """Encode prompt and completion apart, as generation encodes a prompt, with the end of a document."""
    prompt = tokenizer.encode_prompt(conversation.prompt)
    completion = [*tokenizer.encode(conversation.completion), tokenizer.end_of_document]
    weights = np.zeros(len(prompt) + len(completion), np.uint8)
    weights[len(prompt) :] = 1
    return EncodedConversation(np.array(prompt + completion, np.uint32), weights)
