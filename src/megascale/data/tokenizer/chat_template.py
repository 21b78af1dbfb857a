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
from typing import TYPE_CHECKING, Any, NoReturn

from megascale.config.text_files import read_text
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.huggingface_file import CONFIG
from megascale.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Environment

# Limits of a template, which may come from strangers.
_MAX_REPETITION = 1 << 24  # characters or entries of a repeated value
_MAX_EXPONENT = 1 << 12
_MAX_POWER_BITS = 1 << 20  # of an integer, since powers of powers grow beyond any memory
_MAX_CHARACTERS = 1 << 26  # of a rendered text, and of a text that a template joins
_MAX_JOINED_CHARACTERS = 1 << 32  # of all texts that a rendering joins; copies of them take about a second
_MAX_ITERATIONS = 1 << 22  # of all loops of a rendering together; about a second
_MAX_FORMAT_WIDTH = 1 << 16  # characters of a padded value
# The digits of a width or a precision in a printf-style format, or a star, which takes it from the arguments.
_FORMAT_SPEC = re.compile(r"\{[^{}:]*:([^{}]*)")  # of str.format
_NESTED_SPEC = re.compile(r":[^{}]*\{")  # a width that str.format takes from its arguments
_PRINTF_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")

_TOO_LONG = f"it writes more than {_MAX_CHARACTERS:,} characters"

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

        self.source = source
        self.name = name
        self.special_tokens = dict(special_tokens)
        self.dates: dict[str, str] = {}
        self.dropped_names: Counter[str] = Counter()
        self._time = datetime.now()
        environment = _make_environment()
        environment.globals["strftime_now"] = self._format_time
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"{name}, line {error.lineno}: the chat template is not valid Jinja: {error.message}; correct the file"
            ) from None
        # The parser counts the tags in _make_environment.
        self.has_generation_blocks = bool(environment.generation_blocks)  # type: ignore[attr-defined]

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

        self._environment.start_rendering()  # type: ignore[attr-defined]
        variables = {"messages": messages, "tools": tools, "documents": None} | self.special_tokens
        sections = []
        length = 0
        try:
            for section in self._template.generate(add_generation_prompt=add_generation_prompt, **variables):
                length += len(section)
                if length > _MAX_CHARACTERS:
                    raise JinjaError(_TOO_LONG)
                sections.append(section)
            return "".join(sections)
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


def _make_environment() -> Environment:
    """Return a Jinja sandbox with the filters, functions and tags that chat templates of transformers use.

    `strftime_now` is missing, which the caller adds.
    """
    from jinja2 import nodes, pass_eval_context
    from jinja2.exceptions import TemplateError as JinjaError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.filters import FILTERS as DEFAULT_FILTERS
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class GenerationBlocks(Extension):
        """Tag `{% generation %}`, whose body is text of the assistant. The environment counts the tags."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads the class attribute

        def __init__(self, environment: Environment) -> None:
            super().__init__(environment)
            environment.extend(generation_blocks=0)

        def parse(self, parser: Parser) -> nodes.Node:
            self.environment.generation_blocks += 1  # type: ignore[attr-defined]
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = nodes.CallBlock(self.call_method("_mark"), [], [], body)
            return call.set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BLOCK_BEGIN}{caller()}{_BLOCK_END}"

    def raise_exception(message: str) -> NoReturn:
        raise JinjaError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes characters of HTML.
        check_width(options.get("indent"))
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def check_width(width: Any) -> None:
        if isinstance(width, int) and abs(width) > _MAX_FORMAT_WIDTH:
            raise JinjaError(f"it pads a value to more than {_MAX_FORMAT_WIDTH:,} characters")

    def check_printf(text: str, arguments: Any) -> None:
        """Raise JinjaError if a printf-style format, or a number that it may take as a width, is too large."""
        for widths in _PRINTF_WIDTH.findall(text):
            for width in widths:
                if width == "*":
                    values = arguments if isinstance(arguments, tuple) else (arguments,)
                    for value in values:
                        check_width(value)
                elif width:
                    # A number of many digits takes long to convert.
                    check_width(int(width[:10]))

    def check_str_format(text: str, arguments: list[Any]) -> None:
        """Raise JinjaError if the format of str.format, or a value that it may take as a width, is too large."""
        for spec in _FORMAT_SPEC.findall(text):
            for digits in re.findall(r"\d+", spec):
                check_width(int(digits[:10]))
        if _NESTED_SPEC.search(text):
            values = [value for item in arguments for value in (item.values() if isinstance(item, dict) else (item,))]
            for value in values:
                for digits in re.findall(r"\d+", str(value)[:20]) if isinstance(value, str | int) else ():
                    check_width(int(digits[:10]))

    def call_method(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        method = nodes.EnvironmentAttribute(name, lineno=line)
        return nodes.Call(method, arguments, [], None, None, lineno=line)

    class ConcatBounder(NodeTransformer):
        """Replaces the operator `~`, whose function the compiler fixes, by a method with a bound."""

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return call_method("join_operands", list(node.nodes), node.lineno)

    def check_length(length: int) -> None:
        if length > _MAX_CHARACTERS:
            raise JinjaError(_TOO_LONG)

    def measure(value: Any) -> int:
        return len(value) if isinstance(value, str | bytes | list | tuple) else 0

    def replace_text(eval_ctx: Any, text: str, old: str, new: str, count: int | None = None) -> str:
        check_replacement(str(text), str(old), str(new), -1 if count is None else count)
        replaced: str = DEFAULT_FILTERS["replace"](eval_ctx, text, old, new, count)
        return replaced

    def check_replacement(text: str, old: str, new: str, count: int = -1) -> None:
        occurrences = text.count(old)
        if count >= 0:
            occurrences = min(occurrences, count)
        check_length(len(text) + occurrences * len(new))

    def center_text(value: str, width: int = 80) -> str:
        check_width(width)
        return str(value).center(width)

    def batch_values(values: Any, count: int, fill: Any = None) -> Any:
        check_width(count)
        return DEFAULT_FILTERS["batch"](values, count, fill)

    def slice_values(values: Any, count: int, fill: Any = None) -> Any:
        check_width(count)
        return DEFAULT_FILTERS["slice"](values, count, fill)

    def format_text(value: str, *arguments: Any, **keywords: Any) -> str:
        check_printf(str(value), arguments)
        return str(value) % (keywords or arguments)

    def indent_text(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        check_width(len(width) if isinstance(width, str) else width)
        check_length(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
        indented: str = DEFAULT_FILTERS["indent"](text, width, first, blank)
        return indented

    def join_values(eval_ctx: Any, values: Any, separator: str = "", attribute: Any = None) -> str:
        items = list(values)
        texts = sum(measure(item) for item in items) if attribute is None else 0
        check_length(texts + len(items) * len(str(separator)))
        joined: str = DEFAULT_FILTERS["join"](eval_ctx, items, separator, attribute)
        return joined

    class BoundedSandbox(ImmutableSandboxedEnvironment):
        """A sandbox in which a short template cannot exhaust memory or time.

        Products, sums, formats and padded texts have bounds, and so has the number of iterations of a rendering.
        """

        intercepted_binops = frozenset({"*", "**", "+", "%"})
        iterations = 0
        joined_characters = 0

        def start_rendering(self) -> None:
            """Set the counts of a rendering to zero."""
            self.iterations = 0
            self.joined_characters = 0

        def count_iteration(self) -> None:
            """Raise JinjaError after the last iteration or call that a rendering may have."""
            self.iterations += 1
            if self.iterations > _MAX_ITERATIONS:
                raise JinjaError(f"its loops and calls have more than {_MAX_ITERATIONS:,} iterations")

        def count_joined(self, length: int) -> None:
            """Raise JinjaError if a text, or all joined texts of the rendering together, are too long."""
            check_length(length)
            self.joined_characters += length
            if self.joined_characters > _MAX_JOINED_CHARACTERS:
                raise JinjaError(f"it joins texts of more than {_MAX_JOINED_CHARACTERS:,} characters in all")

        def concat(self, texts: Any) -> str:  # type: ignore[override]
            """Join the texts of a block or a macro."""
            sections = []
            length = 0
            for text in texts:
                length += len(text)
                check_length(length)
                sections.append(text)
            self.count_joined(length)
            return "".join(sections)

        def join_operands(self, *operands: Any) -> str:
            """Return the result of the operator `~`."""
            return self.concat(map(str, operands))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            template = super()._parse(source, name, filename)
            for loop in template.find_all(nodes.For):
                loop.body.insert(0, nodes.ExprStmt(call_method("count_iteration", [], loop.lineno), lineno=loop.lineno))
            bounded_template: nodes.Template = ConcatBounder().visit(template)
            return bounded_template

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def format_checked(*arguments: Any, **keywords: Any) -> str:
                check_str_format(value.__self__, [*arguments, *keywords.values()])
                formatted: str = wrapped(*arguments, **keywords)
                return formatted

            return format_checked

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, count in ((left, right), (right, left)):
                is_repetition = isinstance(value, str | bytes | list | tuple) and isinstance(count, int)
                if operator == "*" and is_repetition and len(value) * count > _MAX_REPETITION:
                    raise JinjaError(f"it repeats a value to more than {_MAX_REPETITION:,} characters")
            if operator == "**" and isinstance(right, int):
                if abs(right) > _MAX_EXPONENT:
                    raise JinjaError(f"it has an exponent above {_MAX_EXPONENT:,}")
                if isinstance(left, int) and left.bit_length() * right > _MAX_POWER_BITS:
                    raise JinjaError(f"it has a power of more than {_MAX_POWER_BITS:,} bits")
            if operator == "+":
                self.count_joined(measure(left) + measure(right))
            if operator == "%" and isinstance(left, str | bytes):
                check_printf(left if isinstance(left, str) else left.decode("latin-1"), right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            __self.count_iteration()
            owner = getattr(__obj, "__self__", None)
            name = getattr(__obj, "__name__", "")
            if isinstance(owner, str | bytes):
                if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                    for argument in (*args, *kwargs.values()):
                        check_width(argument)
                if name == "expandtabs":
                    check_length(len(owner) * int((*args, *kwargs.values(), 8)[0]))
                if name == "replace" and len(args) >= 2:
                    check_replacement(owner, *args[:3])  # type: ignore[arg-type]
                if name == "join" and args:
                    items = list(args[0])
                    check_length(sum(map(measure, items)) + len(items) * len(owner))
                    args = (items,)
            return super().call(__context, __obj, *args, **kwargs)

    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
    environment.filters |= {
        "tojson": to_json,
        "replace": pass_eval_context(replace_text),
        "center": center_text,
        "format": format_text,
        "indent": indent_text,
        "join": pass_eval_context(join_values),
        "batch": batch_values,
        "slice": slice_values,
    }
    del environment.globals["lipsum"]  # it writes any number of paragraphs, and no chat has them
    environment.globals["raise_exception"] = raise_exception
    return environment


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
