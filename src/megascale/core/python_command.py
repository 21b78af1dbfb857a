"""How this package starts Python: never with the working directory among the folders that modules are imported from.

`python -m` puts the working directory first on `sys.path`. A module there, such as one named
`queue` in a shared folder, would run with the rights of the job's user.
"""

from __future__ import annotations

import os
import sys


def module_command(module: str, *words: str, python: str | None = None) -> list[str]:
    """Return the words that run `module` with `words`, by `python` (this interpreter by default).

    `-P` takes the working directory off `sys.path`; folders of PYTHONPATH stay.
    """
    return [python or sys.executable, "-P", "-m", module, *words]


def leave_working_directory() -> None:
    """Take the working directory off `sys.path` in a process that was started with `python -m`."""
    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]


def protect_children() -> None:
    """Have every Python that this process starts, by whatever library, leave the working directory off `sys.path`."""
    os.environ["PYTHONSAFEPATH"] = "1"
