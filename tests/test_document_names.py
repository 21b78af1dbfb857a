"""Names in running text of the documents: settings and their values, options, identifiers, messages, headings.

`test_docs.py` checks files, modules and functions, `test_commands.py` whole commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megascale.config.base import UNSET
from megascale.config.loading import _parse_override
from megascale.config.tree import Config
from tests.test_commands import PROGRAMS, SHORT_NAMES, command_line, parse

ROOT = Path(__file__).parents[1]
GENERATED = ("appendix-tests.md", "configuration.md")
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("docs/models/*.md"))
# The change log says what was true on its dates.
CURRENT = [page for page in PAGES if page.name not in (*GENERATED, "CHANGELOG.md")]
SOURCES = ("src", "benchmarks", "tests", "scripts", "examples", "deploy")
SOURCE_SUFFIXES = (".py", ".toml", ".yaml", ".js", ".html", ".css", ".sh", ".json")

FENCED = re.compile(r"^```.*?^```", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
SETTING = re.compile(
    rf"(?<![\w./-])(?:--)?((?:{'|'.join(Config.model_fields)})(?:\.[a-z_][a-z_0-9]*)+)(?![\w./(]|\.\w)"
)
VALUE = re.compile(SETTING.pattern.partition("(?!")[0] + r'=("[^"]*"|\[[^\]\n]*\]|[^\s`"|]+)')
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w.])")
IDENTIFIER = re.compile(r"(?<![\w/.-])[A-Za-z]+(?:_[A-Za-z0-9]+)+(?!\w|\.py)")
ATTRIBUTE = re.compile(r"(?<![\w./])([A-Z]\w+)\.([a-z_]\w*)")
PHRASE = re.compile(r"[A-Za-z][\w',:;-]*(?: [\w'(),:;.-]+)+")
LINK = re.compile(r"\]\(([\w./-]*\.md|)#([^)\s]+)\)")
# Languages of blocks: test_commands.py reads commands in the first three.
LANGUAGES = ("", "sh", "console", "python", "toml", "text", "{toctree}", "{eval-rst}")

# Files, tensors, parts of a documented plugin, and keys of other trainers that look like settings.
NOT_SETTINGS = re.compile(
    r".*\.(md|py|toml)|kernels\.json|slurm\.conf|model\.safetensors|model\.embedding\.token\.weight|train\.(bin|idx|weights)"
    r"|checkpoint\.enable|optimizer\.lr|optimizer\.lion_beta"
)
# Parts that the pages on extending register, and values that the pages call wrong or list.
REGISTERED = {"mixture", "lion", "patience", "printed", "z_loss", "squared_relu", "in_thirds", "mine"}
REFUSED = {"100000000", "2e9"}
# Options of scripts and of other programs in running text.
OTHER_OPTIONS = {
    "--all-looks", "--area", "--dist", "--packages", "--rerun", "--timeout", "--where",
    "--appendonly", "--array", "--bind", "--container-image", "--container-mounts", "--container-name", "--exclude",
    "--exclusive", "--force", "--format", "--gpus-per-node", "--image", "--job-name", "--label", "--load",
    "--long", "--lr", "--lr-decay-iters", "--lr-decay-style", "--lr-warmup-iters", "--lr-wsd-decay-iters",
    "--lr-wsd-decay-style", "--master-addr", "--master-port", "--max-restarts", "--maxclients", "--mem", "--min-lr",
    "--net", "--nnodes", "--no-kill", "--node-rank", "--nproc-per-node", "--ntasks", "--ntasks-per-node", "--nv",
    "--open-mode",
    "--output", "--overlap", "--overrides", "--partition", "--reject-with", "--requeue", "--resume-from-step", "--save",
    "--signal", "--standalone", "--states", "--tcp-backlog", "--time",
}  # fmt: skip
# Identifiers of other programs, and of no code.
OTHER_IDENTIFIERS = {
    "NCCL_ALGO", "NCCL_NVLS_ENABLE", "all_reduce_perf", "final_lr_frac", "local_shard", "min_lr_factor", "minus_sqrt",
    "my_package", "pretrain_gpt",
}  # fmt: skip
# Placeholders and files that look like attributes.
OTHER_OWNERS = {"CHANGELOG", "LAST", "PREFIX", "REGISTRY", "RRRRR"}
# Pages whose code phrases and quotations are messages or states that the program prints.
MESSAGE_PAGES = sorted(ROOT.glob("docs/failures*.md")) + [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "anomalies",
        "continue-without-a-replica",
        "diagnostics",
        "job-states",
        "resilience",
        "troubleshooting",
    )
]
# Phrases there that are commands or settings of other programs.
NOT_MESSAGES = re.compile(
    r"(spare, self-checks|megascale|data|evaluate|convert|faults|launch|train|weight|python|torchrun|git|pip) ?-?"
)


@cache
def read_sources() -> str:
    """Return the text of all sources."""
    files = (file for folder in SOURCES for file in (ROOT / folder).rglob("*") if file.suffix in SOURCE_SUFFIXES)
    text = "\n".join(file.read_text(errors="ignore") for file in sorted(files) if "__pycache__" not in file.parts)
    return text + (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()


@cache
def list_identifiers() -> set[str]:
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", read_sources()))


@cache
def list_words_by_file() -> list[set[str]]:
    """Return the identifiers of each Python source."""
    files = [file for folder in ("src", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    return [set(re.findall(r"[A-Za-z_]\w*", file.read_text())) for file in files if file != Path(__file__)]


@cache
def read_messages() -> str:
    """Return the text of what the programs print, with strings that continue on the next line joined."""
    files = [file for folder in ("src", "tests/chaos") for file in sorted((ROOT / folder).rglob("*.py"))]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    return " ".join(joined.split())


@cache
def list_options() -> set[str]:
    """Return the options of all commands of the documented programs."""
    options: set[str] = set()

    def visit(command: Any) -> None:
        for parameter in command.params:
            options.update(parameter.opts + parameter.secondary_opts)
        for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
            visit(command.get_command(None, name))

    for program in PROGRAMS:
        visit(command_line(program))
    return options


def find_field(key: str) -> FieldInfo | None:
    """Return the field of a setting, of a table within a section too, or None."""
    model: type[BaseModel] = Config
    field = None
    for part in SHORT_NAMES.get(key, key).split("."):
        field = model.model_fields.get(part)
        if field is None:
            return None
        tables = [field.annotation, *get_args(field.annotation)]
        model = next((t for t in tables if isinstance(t, type) and issubclass(t, BaseModel)), BaseModel)
    return field


def explain_value(key: str, text: str) -> str:
    """Return why a setting does not take the value, or an empty string."""
    field = find_field(key)
    assert field is not None
    value = _parse_override(f"{SHORT_NAMES.get(key, key)}={text}")[2]
    if value == UNSET:
        return ""
    annotation: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        return str(error)
    return ""


def list_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of each setting that a page gives a value, without placeholders and shell variables."""
    for match in VALUE.finditer(text):
        value = match[2].strip('"').rstrip(").,;:")
        if value and not re.search(r"\b[A-Z]+\b|\.\.\.|^'|\$", value):
            yield match[1], value


def list_headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub and myst make them, and its explicit labels."""
    text = FENCED.sub("", page.read_text())
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 0
        while anchor + (f"-{number}" if number else "") in anchors:
            number += 1
        anchors.add(anchor + (f"-{number}" if number else ""))
    return anchors | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


def find_wrong_settings(text: str) -> list[str]:
    """Return the keys of a page that do not exist, and the values that their settings refuse."""
    keys = {match[1] for match in SETTING.finditer(text) if not NOT_SETTINGS.fullmatch(match[1])}
    wrong = [key for key in sorted(keys) if find_field(key) is None]
    for key, value in list_values(text):
        if NOT_SETTINGS.fullmatch(key) or key in wrong or value in REGISTERED | REFUSED:
            continue
        reason = explain_value(key, value)
        if reason and "," in value:  # the values of `alternate`, `search` and `vary`
            reason = "".join(explain_value(key, part) for part in value.split(","))
        if reason:
            wrong.append(f"{key}={value}: {reason}")
    return wrong


def find_unknown_names(text: str) -> list[str]:
    """Return the options and identifiers in a page's running text that no source has."""
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text))]
    options = {option for span in spans for option in OPTION.findall(span)}
    unknown = options - list_options() - OTHER_OPTIONS
    names = {name for span in spans if not span.startswith("http") for name in IDENTIFIER.findall(span)}
    for name in names - list_identifiers() - OTHER_IDENTIFIERS:
        # Such as the first part of the name of several metrics.
        if not any(identifier.startswith(name) for identifier in list_identifiers()):
            unknown.add(name)
    return sorted(unknown)


def find_unknown_attributes(text: str) -> list[str]:
    """Return the attributes of classes in running text, such as `Exchange.send`, that no file with the class has."""
    spans = SPAN.findall(FENCED.sub("", text))
    names = {match for span in spans for match in ATTRIBUTE.findall(span)}
    return sorted(
        f"{owner}.{attribute}"
        for owner, attribute in names
        if owner not in OTHER_OWNERS and not any({owner, attribute} <= words for words in list_words_by_file())
    )


def find_missing_messages(text: str) -> list[str]:
    """Return the parts of a page's quoted messages that no program prints."""
    text = FENCED.sub("", text)
    quoted = SPAN.findall(text) + re.findall(r'"([^"\n]{6,})"', text)
    missing = []
    for phrase in sorted({" ".join(phrase.split()) for phrase in quoted}):
        if PHRASE.fullmatch(phrase) and not NOT_MESSAGES.match(phrase):
            fixed = [part.strip(" :,") for part in re.split(r"\b[A-Z]+\b|\.\.\.", phrase)]
            missing += [part for part in fixed if len(part) > 3 and part not in read_messages()]
    return missing


def find_dead_anchors(page: Path) -> list[str]:
    """Return the links of a page to headings that do not exist."""
    dead = []
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if target.exists() and anchor not in list_headings(target):
            dead.append(f"{path}#{anchor}")
    return dead


def find_untested_blocks(text: str) -> list[str]:
    """Return languages of blocks that `test_commands.py` does not read, and commands outside of a block."""
    languages = set(re.findall(r"^```(.*)$", text, re.M)[::2])
    return sorted(languages - set(LANGUAGES)) + re.findall(
        r"^    (?:megascale|torchrun) .*$", FENCED.sub("", text), re.M
    )


def collect(pages: list[Path], check: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a check finds, by page."""
    results = {str(page.relative_to(ROOT)): check(page.read_text()) for page in pages}
    return {page: wrong for page, wrong in results.items() if wrong}


def test_settings_exist_and_take_the_values_of_the_documents():
    assert not collect(CURRENT, find_wrong_settings)


def test_options_and_identifiers_in_running_text_exist():
    assert not collect(CURRENT, find_unknown_names)


def test_attributes_of_classes_exist():
    assert not collect(CURRENT, find_unknown_attributes)


def test_messages_that_pages_quote_are_printed():
    assert not collect(MESSAGE_PAGES, find_missing_messages)


def test_links_lead_to_headings():
    dead = {page.name: find_dead_anchors(page) for page in PAGES}
    assert not {name: anchors for name, anchors in dead.items() if anchors}


def test_commands_stand_in_blocks_that_are_tested():
    assert not collect(PAGES, find_untested_blocks)


def test_the_rows_of_the_speed_tables_parse():
    """Parse the rows under "arguments of `megascale bench train`". Rows of half of GPT 13B have no preset."""
    header = "| row | arguments of `megascale bench train` |"
    tables = (ROOT / "docs/performance.md").read_text().split(header)[1:]
    arguments = [span for table in tables for span in SPAN.findall(table.partition("\n\n")[0])]
    assert len(arguments) >= 20
    for row_arguments in arguments:
        preset = "gpt-13b " if row_arguments.startswith("--") else ""
        if " " in row_arguments or preset:
            parse(f"megascale bench train {preset}{row_arguments}")


def test_each_check_notices_what_is_wrong(tmp_path):
    wrong = find_wrong_settings("`parallel.zeroo=1`, `--parallel.recompute=everything` and `--parallel.recompute=mlp`")
    assert [text.partition(":")[0] for text in wrong] == ["parallel.zeroo", "parallel.recompute=everything"]
    assert find_unknown_names("`--no-such-option` of `no_such_identifier_" + "here` and `--gpus`") == [
        "--no-such-option",
        "no_such_identifier_" + "here",
    ]
    assert find_unknown_attributes("`Exchange.teleport_" + "peers` and `Grid.replicas`") == [
        "Exchange.teleport_" + "peers"
    ]
    assert find_missing_messages('It prints "the flux capacitor is empty".') == ["the flux capacitor is empty"]
    page = tmp_path / "page.md"
    page.write_text("# A heading\n\n[here](#a-heading) and [there](#another)\n")
    assert find_dead_anchors(page) == ["#another"]
    assert find_untested_blocks("```bash\nls\n```\n\n    megascale plan\n") == ["bash", "    megascale plan"]
