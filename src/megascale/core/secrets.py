"""What the environment of a job's processes keeps: the password of the rendezvous' Redis server, the token of replicas.

Neither is ever in a log or in a list of processes; the password in no file either. The job's own secret may be given to
an agent in its environment, and does not stay there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PASSWORD_VARIABLE = "MEGASCALE_REDIS_PASSWORD"
REPLICA_VARIABLE = "MEGASCALE_REPLICA_TOKEN"
JOB_SECRET_VARIABLE = "MEGASCALE_JOB_SECRET"
_JOB_SECRET_PIPE = "MEGASCALE_JOB_SECRET_PIPE"  # number of the descriptor from which an agent reads it
_PIPE_BYTES = 4096  # that a pipe holds without a reader
_KEY = "--rendezvous.url"


def remove_password(words: Sequence[str]) -> tuple[list[str], str | None]:
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


def hide_secrets() -> None:
    """Become the same command without the secrets that other processes could read, if there are any.

    Every user of the machine may read a process's words, and a process of the same user its environment, as they were
    at its start. A password in rendezvous.url goes into the environment, which trainers inherit; an agent's job secret
    goes into a pipe, which it reads once. Does nothing in a fork, whose words are another command's.
    """
    words, password = remove_password(sys.orig_argv)
    job_secret = os.environ.get(JOB_SECRET_VARIABLE) if sys.argv[1:2] == ["agent"] else None
    if password is None and job_secret is None:
        return
    if sys.argv[1:] != sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :]:
        return
    if password is not None:
        os.environ[PASSWORD_VARIABLE] = password
    if job_secret is not None:
        del os.environ[JOB_SECRET_VARIABLE]
        os.environ[_JOB_SECRET_PIPE] = str(_fill_pipe(job_secret.encode()))
    os.execv(sys.executable, words)


def take_job_secret() -> str:
    """Return the job's secret that this process was given in its environment, and forget it; empty if there is none."""
    pipe = os.environ.pop(_JOB_SECRET_PIPE, "")
    secret = os.environ.pop(JOB_SECRET_VARIABLE, "")
    if pipe.isdecimal():
        with open(int(pipe), "rb") as file:
            secret = file.read(_PIPE_BYTES).decode()
    return secret


def _fill_pipe(data: bytes) -> int:
    """Return the end of a pipe, inherited by the next program, from which `data` is read."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    with open(writer, "wb") as file:
        file.write(data[:_PIPE_BYTES])
    return reader
