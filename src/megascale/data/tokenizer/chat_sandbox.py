"""The sandbox in which chat templates are rendered (chat_template.py).

A template comes with a tokenizer, whose author is not trusted. jinja2's immutable sandbox keeps a template away from
attributes and from changes. The sandbox of this module also bounds memory and time: products, sums, formats and padded
texts have bounds, and so has the number of iterations and calls of a rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Limits of a template, which may come from strangers.
_MAX_REPETITION = 1 << 24  # characters or entries of a repeated value
_MAX_EXPONENT = 1 << 12
_MAX_POWER_BITS = 1 << 20  # of an integer, since powers of powers grow beyond any memory
_MAX_CHARACTERS = 1 << 26  # of a rendered text, and of a text that a template joins
_MAX_JOINED_CHARACTERS = 1 << 32  # of all texts that a rendering joins; copies of them take about a second
_MAX_ITERATIONS = 1 << 22  # of all loops of a rendering together; about a second
_MAX_FORMAT_WIDTH = 1 << 16  # characters of a padded value
_FORMAT_SPEC = re.compile(r"\{[^{}:]*:([^{}]*)")  # of str.format
_NESTED_SPEC = re.compile(r":[^{}]*\{")  # a width that str.format takes from its arguments
# The digits of a width or a precision in a printf-style format, or a star, which takes it from the arguments.
_PRINTF_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")

_TOO_LONG = f"it writes more than {_MAX_CHARACTERS:,} characters"


class _GenerationBlocks(Extension):
    """Tag `{% generation %}`, whose body is text of the assistant. The body gets the sandbox's block marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads the class attribute

    environment: BoundedSandbox  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.has_generation_blocks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_mark"), [], [], body)
        return call.set_lineno(line)

    def _mark(self, caller: Any) -> str:
        begin, end = self.environment.block_marks
        return f"{begin}{caller()}{end}"


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes characters of HTML.
    _check_width(options.get("indent"))
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > _MAX_FORMAT_WIDTH:
        raise JinjaError(f"it pads a value to more than {_MAX_FORMAT_WIDTH:,} characters")


def _check_printf(text: str, arguments: Any) -> None:
    """Raise JinjaError if a printf-style format, or a number that it may take as a width, is too large."""
    for widths in _PRINTF_WIDTH.findall(text):
        for width in widths:
            if width == "*":
                values = arguments if isinstance(arguments, tuple) else (arguments,)
                for value in values:
                    _check_width(value)
            elif width:
                # A number of many digits takes long to convert.
                _check_width(int(width[:10]))


def _check_str_format(text: str, arguments: list[Any]) -> None:
    """Raise JinjaError if the format of str.format, or a value that it may take as a width, is too large."""
    for spec in _FORMAT_SPEC.findall(text):
        _check_numbers(spec)
    if _NESTED_SPEC.search(text):
        for argument in arguments:
            values = argument.values() if isinstance(argument, dict) else [argument]
            for value in values:
                if isinstance(value, str | int):
                    _check_numbers(str(value)[:20])


def _check_numbers(text: str) -> None:
    """Raise JinjaError if a number in the text is too large as a width. Numbers of many digits convert slowly."""
    for digits in re.findall(r"\d+", text):
        _check_width(int(digits[:10]))


def _call_method(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    method = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(method, arguments, [], None, None, lineno=line)


class _ConcatBounder(NodeTransformer):
    """Replaces the operator `~`, whose function the compiler fixes, by a method with a bound."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_method("join_operands", list(node.nodes), node.lineno)


def _check_length(length: int) -> None:
    if length > _MAX_CHARACTERS:
        raise JinjaError(_TOO_LONG)


def _measure(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _replace_text(eval_ctx: Any, text: str, old: str, new: str, count: int | None = None) -> str:
    _check_replacement(str(text), str(old), str(new), -1 if count is None else count)
    replaced: str = DEFAULT_FILTERS["replace"](eval_ctx, text, old, new, count)
    return replaced


def _check_replacement(text: str, old: str, new: str, count: int = -1) -> None:
    occurrences = text.count(old)
    if count >= 0:
        occurrences = min(occurrences, count)
    _check_length(len(text) + occurrences * len(new))


def _center_text(value: str, width: int = 80) -> str:
    _check_width(width)
    return str(value).center(width)


def _batch_values(values: Any, count: int, fill: Any = None) -> Any:
    _check_width(count)
    return DEFAULT_FILTERS["batch"](values, count, fill)


def _slice_values(values: Any, count: int, fill: Any = None) -> Any:
    _check_width(count)
    return DEFAULT_FILTERS["slice"](values, count, fill)


def _format_text(value: str, *arguments: Any, **keywords: Any) -> str:
    _check_printf(str(value), arguments)
    return str(value) % (keywords or arguments)


def _indent_text(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(len(width) if isinstance(width, str) else width)
    _check_length(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    indented: str = DEFAULT_FILTERS["indent"](text, width, first, blank)
    return indented


def _join_values(eval_ctx: Any, values: Any, separator: str = "", attribute: Any = None) -> str:
    items = list(values)
    texts = sum(_measure(item) for item in items) if attribute is None else 0
    _check_length(texts + len(items) * len(str(separator)))
    joined: str = DEFAULT_FILTERS["join"](eval_ctx, items, separator, attribute)
    return joined


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which a short template cannot exhaust memory or time.

    Attributes:
        block_marks: texts before and after a generation block in the rendered text.
        has_generation_blocks: whether a template of the sandbox has generation blocks.
        iterations: iterations of loops and calls of the present rendering.
        joined_characters: characters of all texts that the present rendering has joined.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    block_marks = ("", "")
    has_generation_blocks = False
    iterations = 0
    joined_characters = 0

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Return the text that a template of this sandbox writes. Raises the errors of jinja2 and of the template."""
        self.iterations = 0
        self.joined_characters = 0
        sections = []
        length = 0
        for section in template.generate(variables):
            length += len(section)
            _check_length(length)
            sections.append(section)
        return "".join(sections)

    def count_iteration(self) -> None:
        """Raise JinjaError after the last iteration or call that a rendering may have."""
        self.iterations += 1
        if self.iterations > _MAX_ITERATIONS:
            raise JinjaError(f"its loops and calls have more than {_MAX_ITERATIONS:,} iterations")

    def count_joined(self, length: int) -> None:
        """Raise JinjaError if a text, or all joined texts of the rendering together, are too long."""
        _check_length(length)
        self.joined_characters += length
        if self.joined_characters > _MAX_JOINED_CHARACTERS:
            raise JinjaError(f"it joins texts of more than {_MAX_JOINED_CHARACTERS:,} characters in all")

    def concat(self, texts: Any) -> str:  # type: ignore[override]
        """Join the texts of a block or a macro."""
        sections = []
        length = 0
        for text in texts:
            length += len(text)
            _check_length(length)
            sections.append(text)
        self.count_joined(length)
        return "".join(sections)

    def join_operands(self, *operands: Any) -> str:
        """Return the result of the operator `~`."""
        return self.concat(map(str, operands))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_call_method("count_iteration", [], loop.lineno), lineno=loop.lineno))
        bounded_template: nodes.Template = _ConcatBounder().visit(template)
        return bounded_template

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def format_checked(*arguments: Any, **keywords: Any) -> str:
            _check_str_format(value.__self__, [*arguments, *keywords.values()])
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
            self.count_joined(_measure(left) + _measure(right))
        if operator == "%" and isinstance(left, str | bytes):
            _check_printf(left if isinstance(left, str) else left.decode("latin-1"), right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.count_iteration()
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                for argument in (*args, *kwargs.values()):
                    _check_width(argument)
            if name == "expandtabs":
                _check_length(len(owner) * int((*args, *kwargs.values(), 8)[0]))
            if name == "replace" and len(args) >= 2:
                _check_replacement(owner, *args[:3])  # type: ignore[arg-type]
            if name == "join" and args:
                items = list(args[0])
                _check_length(sum(map(_measure, items)) + len(items) * len(owner))
                args = (items,)
        return super().call(__context, __obj, *args, **kwargs)


def make_sandbox(block_marks: tuple[str, str], format_time: Callable[[str], str]) -> BoundedSandbox:
    """Return a sandbox with the filters, functions and tags that chat templates of transformers use.

    Args:
        block_marks: texts before and after a generation block in the rendered text.
        format_time: the function `strftime_now` of templates.
    """
    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters |= {
        "tojson": _to_json,
        "replace": pass_eval_context(_replace_text),
        "center": _center_text,
        "format": _format_text,
        "indent": _indent_text,
        "join": pass_eval_context(_join_values),
        "batch": _batch_values,
        "slice": _slice_values,
    }
    del environment.globals["lipsum"]  # it writes any number of paragraphs, and no chat has them
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = format_time
    environment.block_marks = block_marks
    return environment
