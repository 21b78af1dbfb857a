"""What the environment of a job's processes keeps: the password of the rendezvous' Redis server, the token of replicas.

Neither is ever in a log or in a list of processes; the password in no file either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PASSWORD_VARIABLE = "MEGASCALE_REDIS_PASSWORD"
REPLICA_VARIABLE = "MEGASCALE_REPLICA_TOKEN"
_KEY = "--rendezvous.url"


def without_password(words: Sequence[str]) -> tuple[list[str], str | None]:
    """(a command line with no password in rendezvous.url, the last one that was there or None)."""
    if not any("rendezvous" in word for word in words):
        return list(words), None  # reading the settings' types takes longer than the rest of a command's start
    from megascale.config import split_password

    found: list[str] = []
    secret: str | None = None
    for word in words:
        name, equals, url = word.partition("=")
        if name.replace("-", "_") == _KEY.replace("-", "_") and equals:
            shown, held = split_password(url)
            word = f"{name}={shown}"
        elif found and found[-1] == _KEY:
            word, held = split_password(word)
        else:
            held = None
        secret = held if held is not None else secret
        found.append(word)
    return found, secret


def hide_password() -> None:
    """Where this process was started with a password in rendezvous.url, become the same command without it.

    Every user of the machine may read a process's words, nobody else its environment. Does nothing in a fork, whose
    words are another command's.
    """
    words, secret = without_password(sys.orig_argv)
    if secret is None or sys.argv[1:] != sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :]:
        return
    os.environ[PASSWORD_VARIABLE] = secret
    os.execv(sys.executable, words)
