"""Chat templates, which render conversations as text and mark the text of the assistant.

A template is Jinja, rendered as `transformers` does: in an immutable sandbox, with the tokenizer's special tokens as
variables. A template may have `{% generation %}` blocks around the assistant's text. Without such blocks the
assistant's text is found as the difference between two renderings (`ChatTemplate.render`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megascale.config.text_files import read_text
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import CONFIG
from megascale.errors import DataError

Message = Mapping[str, Any]

TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
# Marks around a generation block in the rendered text. Unicode reserves both, and records with them are refused.
_BLOCK_BEGIN, _BLOCK_END = "\U0010fffe", "\U0010ffff"

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of messages, in published data sets
_SPECIAL_NAME = re.compile(r"<\|[^|<>\s{}]{1,40}\|>")  # names such as <|im_start|>
CHATML_BEGIN, CHATML_END = "<|im_start|>", "<|im_end|>"
# ChatML, the template of a tokenizer that is trained on conversations.
CHATML = """{%- if tools -%}
{{- raise_exception('it renders no tools; name a template with --chat-template') -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['tool_calls'] or message['content'] is not string -%}
{{- raise_exception('it renders texts only, no tool_calls; name a template with --chat-template') -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class TemplateError(ValueError):
    """A template refuses a conversation, or does not show which text the assistant has written."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        text: the text.
        spans: ranges [start, stop) of characters that the assistant has written, with the end of the turn.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template, and the special tokens that its text may use as variables.

    Args:
        source: the Jinja text.
        special_tokens: values of variables such as `bos_token`.
        name: name of the template, for messages.

    Attributes:
        has_generation_blocks: whether the template marks the assistant's text.
        dates: texts that renderings have got from `strftime_now`, by its pattern. All renderings have the same time,
            since a span of the assistant is the difference of two of them.
        dropped_names: number of messages whose `name` the text of their conversation lacks, by role.

    Raises DataError if the text is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        from jinja2 import TemplateSyntaxError

        from megascale.data.tokenizer.chat_sandbox import make_sandbox  # only templates need jinja2

        self.source = source
        self.name = name
        self.special_tokens = dict(special_tokens)
        self.dates: dict[str, str] = {}
        self.dropped_names: Counter[str] = Counter()
        self._time = datetime.now()
        environment = make_sandbox((_BLOCK_BEGIN, _BLOCK_END), self._format_time)
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{name}, line {error.lineno}: the chat template is not valid Jinja: {error.message}; correct the file"
            ) from None
        self.has_generation_blocks = environment.has_generation_blocks

    def _format_time(self, pattern: str) -> str:
        """Return the time at which the template was loaded, in a pattern of `strftime`, and record it."""
        self.dates[pattern] = self._time.strftime(pattern)
        return self.dates[pattern]

    def render_text(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: messages with role and content.
            tools: tools that the template may describe.
            add_generation_prompt: end the text with the beginning of the assistant's next turn.

        Raises TemplateError with the template's message if the template refuses the conversation.
        """
        return _remove_marks(self._render(messages, tools, add_generation_prompt)).text

    def render(self, messages: Sequence[Message], tools: Any = None) -> RenderedChat:
        """Return the text of a conversation with the ranges that the assistant has written.

        Without generation blocks, an assistant's message is found as follows. The messages before it are rendered with
        `add_generation_prompt`, and then the messages up to it. The text that the second rendering adds is the
        assistant's turn, without white space at its end.

        Raises TemplateError if the template refuses the conversation, if it leaves a part of it out, or if one
        rendering does not begin with the other.
        """
        marked = self._render(messages, tools, add_generation_prompt=False)
        rendered = _remove_marks(marked)
        spans = rendered.spans
        if not self.has_generation_blocks:
            spans = self._find_spans(messages, tools, rendered.text)
        self._check_completeness(messages, tools, rendered.text)
        return RenderedChat(rendered.text, spans)

    def _find_spans(self, messages: Sequence[Message], tools: Any, text: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges of `text`, the rendering, that the assistant has written, by comparing renderings."""
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prefix = self.render_text(messages[:index], tools=tools, add_generation_prompt=True)
            text_to_turn = self.render_text(messages[: index + 1], tools=tools)
            if not (text_to_turn.startswith(prefix) and text.startswith(text_to_turn)):
                raise TemplateError(
                    f"the template {self.name} renders messages[{index}] differently at the end of a conversation and "
                    "within it, so the assistant's tokens cannot be found; put {% generation %} and "
                    "{% endgeneration %} around the assistant's text in the template, or name another template "
                    "with --chat-template"
                )
            spans.append((len(prefix), len(text_to_turn.rstrip())))
        return tuple(spans)

    def leaves_out(self, messages: Sequence[Message], index: int) -> bool:
        """Return whether the text of a conversation is the same without a message."""
        try:
            text = self.render_text(messages)
        except TemplateError:
            return False
        return self._renders_as(_replace_message(messages, index, None), None, text)

    def _check_completeness(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        """Raise TemplateError if `text`, the rendering, lacks tools, tool calls, reasoning or the content of a message.

        A part is missing if the text is the same without it. Templates drop silently what they do not know. Many drop
        the reasoning before the user's last message on purpose, so only the last answer after it must have reasoning.
        """
        if tools and self._renders_as(messages, None, text):
            raise self._make_missing_error("the tools")
        self._count_dropped_names(messages, tools, text)
        last_indices = {message.get("role"): index for index, message in enumerate(messages)}
        last_answer = last_indices.get("assistant", -1)
        for index, message in enumerate(messages):
            name = f"messages[{index}]"
            content = message.get("content")
            if index == last_answer and index > last_indices.get("user", -1):
                self._check_reasoning(messages, index, tools, text)
            if message.get("tool_calls"):
                changed_message = {key: value for key, value in message.items() if key != "tool_calls"}
                if self._renders_as(_replace_message(messages, index, changed_message), tools, text):
                    raise self._make_missing_error(f"{name}.tool_calls")
                if content is None:
                    self._check_empty_content(messages, index, tools, text)
            is_turn = message.get("role") in ("user", "assistant")
            # A turn whose content is in the text needs no second rendering, which costs time. A template may also
            # change a content, such as one without its reasoning.
            is_visible = not content
            if isinstance(content, str):
                is_visible = not content.strip() or (is_turn and content.strip() in text)
            if not is_visible and self._renders_as(_replace_message(messages, index, None), tools, text):
                raise self._make_missing_error(f"{name} (role {message.get('role')!r})")
            if isinstance(content, list) and str(content) in text:
                raise TemplateError(
                    f"the template {self.name} writes the list of parts in {name}.content as Python prints it; write "
                    "its text as one string, or name a template that renders parts with --chat-template"
                )

    def _count_dropped_names(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        """Count the messages with a `name` if `text`, the rendering, is the same without all names.

        Names are only counted, since most templates leave them out and most models were trained without them.
        """
        roles = [str(message.get("role")) for message in messages if message.get("name")]
        if not roles:
            return
        unnamed_messages = [{key: value for key, value in message.items() if key != "name"} for message in messages]
        if self._renders_as(unnamed_messages, tools, text):
            self.dropped_names.update(roles)

    def _check_reasoning(self, messages: Sequence[Message], index: int, tools: Any, text: str) -> None:
        """Raise TemplateError if `text`, the rendering, lacks the reasoning of a message."""
        message = messages[index]
        for name in _REASONING_KEYS:
            if not message.get(name):
                continue
            # Some data sets have the same text under two keys, of which a template reads one.
            equal_keys = {key for key in _REASONING_KEYS if message.get(key) == message[name]}
            changed_message = {key: value for key, value in message.items() if key not in equal_keys}
            if self._renders_as(_replace_message(messages, index, changed_message), tools, text):
                raise self._make_missing_error(f"messages[{index}].{name}")

    def _check_empty_content(self, messages: Sequence[Message], index: int, tools: Any, text: str) -> None:
        """Raise TemplateError if the null content of a message was rendered as the word None."""
        empty_content = {**messages[index], "content": ""}
        try:
            text_of_empty = self.render_text(_replace_message(messages, index, empty_content), tools=tools)
        except TemplateError:
            return
        if text != text_of_empty and text.replace("None", "") == text_of_empty.replace("None", ""):
            raise TemplateError(
                f"the template {self.name} writes the null content of messages[{index}] as the word None; write an "
                'empty text, "content": "", or name another template with --chat-template'
            )

    def _renders_as(self, messages: Sequence[Message], tools: Any, text: str) -> bool:
        """Return whether a changed conversation is rendered as `text`; False if the template refuses it."""
        try:
            return self.render_text(messages, tools=tools) == text
        except TemplateError:
            return False

    def _make_missing_error(self, part: str) -> TemplateError:
        return TemplateError(
            f"the template {self.name} leaves out {part}, which would not be trained; name a template that renders "
            "all parts with --chat-template, or remove them from the record"
        )

    def find_turn_end(self) -> str:
        """Return the text after the content of an assistant's turn, such as `<|im_end|>`; "" if there is none.

        Raises TemplateError as `render` does.
        """
        content = "Content"
        messages = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": content}]
        chat = self.render(messages)
        if not chat.spans:
            return ""
        start, stop = chat.spans[-1]
        _, _, end = chat.text[start:stop].partition(content)
        return end.strip()

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError as JinjaError

        variables = {"messages": messages, "tools": tools, "documents": None} | self.special_tokens
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._environment.render(self._template, variables)
        except RecursionError:
            raise TemplateError(f"the template {self.name} has a macro that calls itself without end") from None
        except (JinjaError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise TemplateError(f"the template {self.name} refuses the conversation: {error}") from None


def has_marks(text: str) -> bool:
    """Return whether a text has one of the characters that mark generation blocks."""
    return _BLOCK_BEGIN in text or _BLOCK_END in text


def _replace_message(messages: Sequence[Message], index: int, message: Message | None) -> list[Message]:
    """Return the messages with another message at an index, or without a message there for None."""
    replacement = [] if message is None else [message]
    return [*messages[:index], *replacement, *messages[index + 1 :]]


def _remove_marks(marked: str) -> RenderedChat:
    """Return a rendered text without the marks of generation blocks, with the range of each block that is not empty."""
    sections: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for index, section in enumerate(marked.split(_BLOCK_BEGIN)):
        # All sections but the first begin with a block. The end marks of nested blocks stay in `block`.
        block, end_mark, text_after_block = section.rpartition(_BLOCK_END)
        text = section
        if end_mark:
            text = block.replace(_BLOCK_END, "") + text_after_block
        if index and end_mark and block:
            spans.append((length, length + len(block)))
        sections.append(text)
        length += len(text)
    return RenderedChat("".join(sections), tuple(spans))


def find_template(folder: Path) -> str | None:
    """Return the text of the chat template in a tokenizer's folder, or None without one.

    chat_template.jinja has precedence over tokenizer_config.json.
    """
    file = folder / TEMPLATE
    if file.exists():
        return read_template(file)
    template = _read_settings(folder / CONFIG).get("chat_template")
    if isinstance(template, list):
        templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = templates.get("default")
    return template if isinstance(template, str) else None


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate:
    """Return the chat template of a tokenizer's folder.

    Args:
        folder: folder of the tokenizer, with its special tokens.
        file: Jinja file to use instead of the folder's template.

    Raises DataError if there is no template, or if it is not Jinja.
    """
    if file is not None:
        return ChatTemplate(read_template(file), read_special_tokens(folder), str(file))
    source = find_template(folder)
    if source is None:
        raise DataError(
            f"the tokenizer in {folder} has no chat template ({TEMPLATE}, or chat_template in {CONFIG}); copy that of "
            f"the tokenizer with which the model was trained to {folder / TEMPLATE}"
        )
    return ChatTemplate(source, read_special_tokens(folder), str(folder / TEMPLATE))


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens in a tokenizer's settings by their key, such as `eos_token`."""
    tokens: dict[str, str] = {}
    for name in (_SPECIAL_TOKENS_MAP, CONFIG):
        for key, value in _read_settings(folder / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing. Raises DataError for any other file.

    A template renders a special token that is missing as nothing, so damage must not pass for absence.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); copy it again, or remove it") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not a JSON object; copy it again, or remove it")
    return settings


def check_special_tokens(template: ChatTemplate, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Return a note for names in a template that look like special tokens and are encoded as several tokens.

    Raises DataError for a token of the folder's settings that the template writes and the vocabulary lacks. There,
    transformers adds a token with an id that the model may not have.

    Args:
        folder: folder of the tokenizer's settings.
        tokenizer: the tokenizer.
    """
    names_by_key = dict(template.special_tokens)
    settings = _read_settings(folder / CONFIG)
    entries: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        value = settings.get(key)
        if isinstance(value, dict):
            entries += value.values()
        elif isinstance(value, list):
            entries += value
    for entry in entries:
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            names_by_key.setdefault(name, name)
    declared = {name for key, name in names_by_key.items() if key in template.source or name in template.source}
    declared.discard("")
    unknown = sorted(name for name in declared if not _has_own_id(name, tokenizer))
    if unknown:
        raise DataError(
            f"{folder / CONFIG} declares the special tokens {', '.join(map(repr, unknown))}, which the template "
            f"{template.name} writes and tokenizer.json lacks; load the tokenizer with transformers and save it, which "
            "adds them, and resize the model's embeddings if its vocabulary is smaller"
        )
    literal = set(_SPECIAL_NAME.findall(template.source)) - declared
    return [
        f"the template {template.name} writes {name}, which is not a token of the tokenizer, but several"
        for name in sorted(literal)
        if not _has_own_id(name, tokenizer)
    ]


def _has_own_id(name: str, tokenizer: Tokenizer) -> bool:
    """Return whether a name in a rendered chat is encoded as a single token."""
    [(ids, _)] = tokenizer.encode_markup([name])
    return len(ids) == 1


def read_template(file: Path) -> str:
    """Return the text of a Jinja file. Raises DataError if it cannot be read."""
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the chat template {file} cannot be read: {error}; name a Jinja file in UTF-8") from None
