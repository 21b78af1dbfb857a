"""Errors for users: one class per exit code. Each message is one paragraph that names key, value and remedy."""

from __future__ import annotations

from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANNOT_FIT = 3
EXIT_BAD_DATA = 4
EXIT_INTERRUPTED = 130


class MegascaleError(Exception):
    """Failure with a message for the user, which the command line prints without a traceback."""

    exit_code = EXIT_FAILED
    errno = 0  # number of the failed system call, if recovery depends on it: EADDRINUSE, ENOSPC (core/failure.py)


class ConfigError(MegascaleError):
    """Invalid key, value or command: misspelt, of a wrong type, missing (exit 2)."""

    exit_code = EXIT_USAGE


class FitError(MegascaleError):
    """Sizes that do not divide or do not fit the machine (exit 3)."""

    exit_code = EXIT_CANNOT_FIT


class DataError(MegascaleError):
    """Data or checkpoint that is missing, damaged or belongs to another model (exit 4)."""

    exit_code = EXIT_BAD_DATA


class TrainingError(MegascaleError):
    """Training that cannot continue: a NaN loss, a full disk, a lost process (exit 1)."""


def error_class_name(error: MegascaleError) -> str:
    """Return the name of the error's class in this module, from which `make_error` restores it in another process."""
    return next(base.__name__ for base in type(error).__mro__ if base.__module__ == __name__)


def make_error(class_name: str, message: str) -> MegascaleError:
    """Return an error of another process by its class name; TrainingError if the class does not exist here."""
    error_class = globals().get(class_name)
    if isinstance(error_class, type) and issubclass(error_class, MegascaleError):
        return error_class(message)
    return TrainingError(message)


# The extra that installs each optional package.
PACKAGE_EXTRAS = {
    "hiredis": "redis",
    "matplotlib": "plots",
    "regex": "driver",
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
    """Return the error that names the extra of a missing optional package, or None for another module."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGE_EXTRAS:
        return None
    return ConfigError(f"the package {package} is not installed; {describe_install(PACKAGE_EXTRAS[package])}")


def describe_install(extra: str) -> str:
    """Return the command that installs an extra, with the tested versions if the package runs from a checkout."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").exists():
        constraints = "-c constraints.txt " if (checkout / "constraints.txt").exists() else ""
        return f"run pip install {constraints}-e '.[{extra}]' in {checkout}"
    return f"run pip install 'megascale[{extra}]'"
