"""Settings of the Python processes that this package starts.

`python -m` puts the working directory first on `sys.path`. In a shared folder, another user's module named `queue`
would then run with the rights of the job's user. Every process is therefore started without the working directory on
`sys.path`.
"""

from __future__ import annotations

import os
import sys

# Names of the variables that this package has set in the environment of its processes.
_SET_VARIABLES = "MEGASCALE_SET_VARIABLES"


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that runs `module` with `arguments`.

    The option -P keeps the working directory off `sys.path`; folders of PYTHONPATH stay.

    Args:
        python: the interpreter; default: this one.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def leave_working_directory() -> None:
    """Remove the working directory from `sys.path` in a process that was started with `python -m`."""
    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]


def protect_children() -> None:
    """Keep the working directory off `sys.path` in all Python processes that this process starts."""
    if not os.environ.get("PYTHONSAFEPATH"):
        _set_variable("PYTHONSAFEPATH", "1")


def _set_variable(name: str, value: str) -> None:
    """Set an environment variable, and record that this package has set it."""
    os.environ[name] = value
    names = os.environ.get(_SET_VARIABLES, "").split()
    os.environ[_SET_VARIABLES] = " ".join(dict.fromkeys([*names, name]))


def drop_own_variables() -> None:
    """Remove the variables that this package has set, before this process becomes a program of the user."""
    for name in os.environ.pop(_SET_VARIABLES, "").split():
        os.environ.pop(name, None)


def disable_bytecode_cache() -> None:
    """Stop this process from caching the bytecode of modules that it imports later.

    A full disk can truncate a bytecode file without an error. The next process that imports the module would then fail
    with EOFError.
    """
    sys.dont_write_bytecode = True


def sleep_at_barriers() -> None:
    """Let OpenMP threads sleep, not spin, at the end of a parallel region. Call this before torch is loaded.

    On a core that another process shares, a spinning thread delays the thread for which it waits. Results are the same
    bit for bit; dev/log.md has the measurement (2026-11-26). A policy that the user has set is respected.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        _set_variable("OMP_WAIT_POLICY", "PASSIVE")
