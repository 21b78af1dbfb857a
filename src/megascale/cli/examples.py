"""`megascale examples`: list the configurations that the package ships, and copy them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import typer

MAX_DESCRIPTION_LENGTH = 100  # characters


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(examples)


def examples(
    out: Path = typer.Argument(
        None,
        metavar="FOLDER",
        help="Folder for copies, made if missing. Without it the files are listed.",
        show_default=False,
    ),
) -> None:
    """List the example configurations, or copy them, for an installation without a clone.

    Example:

      megascale examples examples
    """
    from megascale.core.atomic_files import write_atomically
    from megascale.errors import ConfigError

    files = sorted(file for file in find_examples().iterdir() if file.is_file())
    if out is None:
        for file in files:
            typer.echo(f"{file.name:28}{describe_example(file)}")
        return
    for file in files:
        target = out / file.name
        try:
            out.mkdir(parents=True, exist_ok=True)
            text = file.read_text(encoding="utf-8")
            if target.exists() and target.read_text(encoding="utf-8") != text:
                raise ConfigError(f"{target} exists and differs from the shipped example; name another folder")
            write_atomically(target, text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{target} cannot be written: {error}; name another folder") from None
        typer.echo(f"wrote {target}")


def find_examples() -> Path:
    """Return the folder of the examples: in the package, or for an editable installation in the clone."""
    import megascale

    package = Path(megascale.__file__).parent
    if (package / "examples").is_dir():
        return package / "examples"
    return package.parents[1] / "examples"


def describe_example(file: Path) -> str:
    """Return the first clause of the comment at the beginning of an example.

    The only example without a comment is the data file of chat.toml, which gets a fixed description.
    """
    comment_lines = []
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().removeprefix("#").strip()
            if not line.startswith("#") or not text:
                break
            comment_lines.append(text)
    if not comment_lines:
        return "conversations for chat.toml"
    clause, *_ = re.split(r"[:.;](?:\s|$)", " ".join(comment_lines))
    return textwrap.shorten(clause, MAX_DESCRIPTION_LENGTH, placeholder="...")
