"""Errors a user may meet: one class per exit code, each message one paragraph naming key, value and remedy."""

from __future__ import annotations

from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANNOT_FIT = 3
EXIT_BAD_DATA = 4
EXIT_INTERRUPTED = 130


class MegascaleError(Exception):
    """A failure with a message meant for a person; the command line prints it without a traceback."""

    exit_code = EXIT_FAILED
    errno = 0  # of the system call that failed, where that decides what follows: EADDRINUSE, ENOSPC (core/failure.py)


class ConfigError(MegascaleError):
    """A key, value or command that is wrong in itself: misspelt, of a wrong type, missing (exit 2)."""

    exit_code = EXIT_USAGE


class FitError(MegascaleError):
    """Sizes that do not divide or do not fit the machine (exit 3)."""

    exit_code = EXIT_CANNOT_FIT


class DataError(MegascaleError):
    """Data or a checkpoint that is missing, damaged or of another model (exit 4)."""

    exit_code = EXIT_BAD_DATA


class TrainingError(MegascaleError):
    """Training that cannot go on: a loss that is not a number, a full disk, a lost process (exit 1)."""


def kind_of(error: MegascaleError) -> str:
    """Name of the class here that an error is of, for `named` in another process: it decides the exit code."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def make_error(kind: str, words: str) -> MegascaleError:
    """The error of a class by its name, as another process told it; TrainingError where there is no such class."""
    found = globals().get(kind)
    return found(words) if isinstance(found, type) and issubclass(found, MegascaleError) else TrainingError(words)


# Package of an extra -> the extra that installs it.
EXTRAS = {
    "matplotlib": "plots",
    "duckdb": "spans",
    "numba": "network",
    "fastapi": "driver",
    "uvicorn": "driver",
    "cryptography": "driver",
    "pyarrow": "formats",
    "zstandard": "formats",
    "tiktoken": "formats",
    "kubernetes": "kubernetes",
    "confluent_kafka": "kafka",
    "s3fs": "s3",
}


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the error that names the extra of a missing optional package, or None for any other module."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return ConfigError(f"the package {package} is not installed; {describe_install(EXTRAS[package])}")


def describe_install(extra: str) -> str:
    """How to get what an optional part of the package needs."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").exists():
        return f"run pip install -e '.[{extra}]' in {checkout}"
    return f"run pip install 'megascale[{extra}]'"
