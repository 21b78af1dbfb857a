"""Conversations in JSON lines, and their encoding as tokens with a loss weight per token.

A line is an object in Hugging Face's form. It has `messages`, each with role and content, or it has `prompt` and
`completion`, which are two texts or two lists of messages. A line may also be the list of messages itself, as nanochat
writes it. Tokens of the assistant and of completions have loss weight 1, all other tokens 0.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.core.untrusted_files import LFS_POINTER, open_regular
from megascale.data.text_encoding import describe_invalid_utf8
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.chat_template import ChatTemplate, Message, RenderedChat, TemplateError, has_marks
from megascale.errors import DataError

_BATCH_CONVERSATIONS = 512  # conversations passed to the tokenizer at a time
_MAX_NAMED_FAULTS = 5  # records that one error names
_UNREAD_SUFFIXES = (".zst", ".bz2", ".xz", ".zip", ".parquet", ".arrow", ".csv", ".tsv")  # of files of conversations
_PROBE_BYTES = 1 << 12  # beginning of a file that shows its format
_MESSAGES_BEGINNING = re.compile(rb'\[\s*\{\s*"(role|content)"')  # of a line that is a list of messages
_MARK_BYTES = b"\xf4\x8f\xbf"  # the first bytes of the two characters that `has_marks` finds
# Keys by which other trainers leave a message out of the loss, and their only values that change nothing.
_TRAINED_VALUES: dict[str, tuple[Any, ...]] = {"weight": (None, 1), "train": (None, True), "trainable": (None, True)}


@dataclass(frozen=True)
class Line:
    """A line of an input file.

    Attributes:
        file: the file.
        number: number of the line, from 1.
        data: the line's bytes.
    """

    file: Path
    number: int
    data: bytes

    def format_fault(self, key: str, problem: str) -> str:
        """Return the message for a problem, with file, line and key."""
        return f"{self.file}, line {self.number}, {key}: {problem}"


@dataclass(frozen=True)
class Conversation:
    """A record: messages for a chat template, or texts of a prompt and its completion.

    Attributes:
        messages: the messages; empty for texts.
        prompt, completion: the texts; "" for messages.
        tools: the record's `tools`, which a template may describe.
        first_loss_message: index of the first message whose tokens may have loss weight 1.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    completion: str = ""
    tools: Any = None
    first_loss_message: int = 0

    def list_texts(self) -> Iterator[str]:
        """Yield the contents of all messages, or prompt and completion."""
        if not self.messages:
            yield self.prompt
            yield self.completion
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str):
                yield content


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation, and the loss weight of each token, 0 or 1."""

    tokens: NDArray[np.uint32]
    weights: NDArray[np.uint8]


class _RecordError(ValueError):
    """A record is unusable.

    Attributes:
        key: key in the record that has the problem.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def read_lines(files: Sequence[Path]) -> Iterator[Line]:
    """Yield the lines of JSON-lines files (plain or .gz) that are not blank.

    Raises DataError for unreadable files, other formats, and a file that is named twice.
    """
    read_files: set[Path] = set()
    for file in files:
        if file.resolve() in read_files:
            raise DataError(f"--chat={file} is named twice, so its conversations would be repeated; name it once")
        read_files.add(file.resolve())
        _check_format(file)
        opener = gzip.open if file.suffix.lower() == ".gz" else open
        try:
            with opener(file, "rb") as lines:
                for number, data in enumerate(lines, 1):
                    if data.strip():
                        yield Line(file, number, data)
        except (OSError, EOFError, zlib.error) as error:  # a damaged .gz raises all three
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"--chat={file} cannot be read: {reason}; name a complete file") from None


def _check_format(file: Path) -> None:
    """Raise DataError for a file whose suffix or beginning shows another format than JSON lines."""
    suffix = file.suffix.lower()
    if suffix in _UNREAD_SUFFIXES:
        raise DataError(f"--chat={file}: {suffix} is not read; give JSON lines, plain or compressed with gzip (.gz)")
    try:
        with open(file, "rb", opener=open_regular) as opened:
            beginning = opened.read(_PROBE_BYTES)
    except OSError:
        return  # the caller reports it
    if beginning.startswith(LFS_POINTER):
        raise DataError(f"--chat={file} is a pointer of Git LFS, not the file itself; get the file with `git lfs pull`")
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"[") and not _MESSAGES_BEGINNING.match(text):
        # The shell empties the output file before the input is read, so the two must differ.
        converted = f"{file.stem}-lines.jsonl" if suffix == ".jsonl" else f"{file.stem}.jsonl"
        raise DataError(
            f'--chat={file} begins with a list, and one record per line is read; convert it with `python -c "import '
            f"json; [print(json.dumps(r)) for r in json.load(open('{file}'))]\" > {converted}`"
        )


def parse_conversation(line: Line) -> Conversation:
    """Return the conversation of a line. Raises DataError with file, line and key for an unusable record."""
    try:
        return _parse_record(_parse_json(line.data))
    except _RecordError as error:
        raise DataError(line.format_fault(error.key, str(error))) from None


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data, object_pairs_hook=_make_object, parse_int=_parse_integer)
    except _RecordError:
        raise
    except (ValueError, RecursionError) as error:
        problem = describe_invalid_utf8(data, position="of the line")
        if problem:
            raise _RecordError("the record", problem) from None
        raise _RecordError("the record", f"it is not JSON ({error}); write one object per line") from None
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise _RecordError("the record", f"it is {_describe(record)}; write an object with the key messages")
    if b"\\u" in data or _MARK_BYTES in data:
        _check_unicode(record)
    return record


def _parse_integer(digits: str) -> int:
    """Return an integer. Raises _RecordError if it is longer than Python's limit."""
    try:
        return int(digits)
    except ValueError:
        raise _RecordError(
            "the record", f"it has an integer of {len(digits):,} characters; write it as a string, or remove it"
        ) from None


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises _RecordError for a key that occurs twice, of which only the last would be read."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _RecordError(repeated, "the key occurs twice in one object; keep one of them")
    return result


def _check_unicode(record: dict[str, Any]) -> None:
    """Raise _RecordError for half of a surrogate pair, which no tokenizer can encode, and for a template's marks."""
    text = json.dumps(record, ensure_ascii=False)
    if has_marks(text):
        raise _RecordError("the record", "it has U+10FFFE or U+10FFFF, which are not characters; remove them")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        raise _RecordError(
            "the record", f"it has {surrogate} without the other half of its surrogate pair; write complete characters"
        ) from None


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
        prompt_messages = _check_messages(prompt, "prompt")
        messages = prompt_messages + _check_messages(completion, "completion")
        conversation = Conversation(messages, tools=record.get("tools"), first_loss_message=len(prompt_messages))
        return _require_answer(conversation, "completion")
    for key in ("prompt", "completion"):
        if not isinstance(record[key], str):
            raise _RecordError(key, f"it is {_describe(record[key])}; write a text in both, or messages in both")
    if not completion:
        raise _RecordError("completion", "it is empty, so no token would count; write an answer, or leave it out")
    return Conversation(prompt=prompt, completion=completion)


def _check_messages(value: Any, key: str) -> tuple[Message, ...]:
    """Return a record's value under `key` as messages. Raises _RecordError for anything else."""
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
        for name, allowed in _TRAINED_VALUES.items():
            if message.get(name) not in allowed:
                raise _RecordError(
                    f"{key}[{index}].{name}",
                    f"{message[name]!r} leaves the message out of the loss in other trainers and has no effect here; "
                    "remove the key, or write prompt and completion, since messages of prompt do not count",
                )
    return tuple(value)


def _require_answer(conversation: Conversation, key: str) -> Conversation:
    """Return a conversation that has a message of the assistant in the loss. Raises _RecordError for others."""
    roles = [message["role"] for message in conversation.messages[conversation.first_loss_message :]]
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
    """Yield each line with its conversation, and with its tokens and loss weights.

    Args:
        template: template that renders messages; None: only prompts and completions that are texts are accepted.

    Raises DataError that names file, line and key of up to five unusable records of a batch.
    """
    batch: list[tuple[Line, Conversation]] = []
    faults: list[str] = []
    for line in lines:
        try:
            batch.append((line, parse_conversation(line)))
        except DataError as error:
            faults.append(str(error))
        if len(batch) + len(faults) >= _BATCH_CONVERSATIONS or len(faults) >= _MAX_NAMED_FAULTS:
            yield from _encode_batch(batch, tokenizer, template, faults)
            batch.clear()
    yield from _encode_batch(batch, tokenizer, template, faults)


def _encode_batch(
    batch: Sequence[tuple[Line, Conversation]], tokenizer: Tokenizer, template: ChatTemplate | None, faults: list[str]
) -> Iterator[tuple[Line, Conversation, EncodedConversation]]:
    """Yield each line of a batch with its conversation and encoding.

    Args:
        faults: faults of the batch's lines that could not be parsed.

    Raises DataError if there are faults, or if the template refuses a conversation.
    """
    chats: list[RenderedChat | None] = [None] * len(batch)  # None for prompts and completions that are texts
    for index, (line, conversation) in enumerate(batch):
        if not conversation.messages:
            continue
        if template is None:
            faults.append(
                line.format_fault("messages", "there is no chat template; name one with --chat-template=FILE.jinja")
            )
            continue
        try:
            chats[index] = render_conversation(conversation, template)
        except TemplateError as error:
            faults.append(line.format_fault("messages", str(error)))
    if faults:
        listing = "\n".join(faults[:_MAX_NAMED_FAULTS])
        more = f"\nand {len(faults) - _MAX_NAMED_FAULTS} more" if len(faults) > _MAX_NAMED_FAULTS else ""
        raise DataError(f"{listing}{more}\nCorrect these records, or remove them")
    texts = [chat.text for chat in chats if chat is not None]
    # Only tokenizer.json files support markup, so `encode_markup` is called only if there are chats.
    encodings = iter(tokenizer.encode_markup(texts) if texts else [])
    for (line, conversation), chat in zip(batch, chats, strict=True):
        if chat is None:
            encoded = _encode_pair(conversation, tokenizer)
        else:
            ids, offsets = next(encodings)
            encoded = EncodedConversation(np.array(ids, np.uint32), weigh_tokens(offsets, chat.spans))
        if not encoded.weights.any():
            raise DataError(line.format_fault("messages", "the assistant's messages have no tokens; write an answer"))
        yield line, conversation, encoded


def render_conversation(conversation: Conversation, template: ChatTemplate) -> RenderedChat:
    """Return the text of a conversation, with the ranges whose tokens have loss weight 1.

    Raises TemplateError as `ChatTemplate.render` does.
    """
    chat = template.render(conversation.messages, conversation.tools)
    if not conversation.first_loss_message:
        return chat
    prompt = conversation.messages[: conversation.first_loss_message]
    prompt_length = len(template.render_text(prompt, tools=conversation.tools))
    return RenderedChat(chat.text, tuple((start, stop) for start, stop in chat.spans if stop > prompt_length))


def weigh_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """Return weight 1 for tokens that overlap a span, 0 for others, uint8 [tokens].

    Args:
        offsets: range [start, stop) of characters of each token.
        spans: ranges [start, stop) of characters.
    """
    ranges = np.array(offsets, np.int64).reshape(-1, 2)
    weights = np.zeros(len(ranges), np.uint8)
    for start, stop in spans:
        weights[(ranges[:, 0] < stop) & (ranges[:, 1] > start)] = 1
    return weights


def _encode_pair(conversation: Conversation, tokenizer: Tokenizer) -> EncodedConversation:
    """Encode prompt and completion separately, as generation encodes a prompt, and end with the end of document."""
    prompt = tokenizer.encode_prompt(conversation.prompt)
    completion = [*tokenizer.encode_continuation(conversation.completion), tokenizer.end_of_document]
    weights = np.zeros(len(prompt) + len(completion), np.uint8)
    weights[len(prompt) :] = 1
    return EncodedConversation(np.array(prompt + completion, np.uint32), weights)
