"""Secrets in the environment of a job's processes: the rendezvous' Redis password, the replica token, the job's secret.

Logs and the list of processes never show the password and the token, and no file has the password. An agent may receive
the job's secret in its environment, from which it is removed at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PASSWORD_VARIABLE = "MEGASCALE_REDIS_PASSWORD"
REPLICA_VARIABLE = "MEGASCALE_REPLICA_TOKEN"
JOB_SECRET_VARIABLE = "MEGASCALE_JOB_SECRET"
_JOB_SECRET_PIPE = "MEGASCALE_JOB_SECRET_PIPE"  # file descriptor from which an agent reads the secret
_PIPE_BYTES = 4096  # a write of this size never blocks, even without a reader
_URL_OPTION = "--rendezvous.url"


def remove_password(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a command line without the password in rendezvous.url, and the last such password or None."""
    if not any("rendezvous" in argument for argument in arguments):
        # Most commands return here, without the slow import of the configuration.
        return list(arguments), None
    from megascale.config import split_password

    cleaned: list[str] = []
    password: str | None = None
    for argument in arguments:
        option, equals, url = argument.partition("=")
        argument_password = None
        if option.replace("-", "_") == _URL_OPTION.replace("-", "_") and equals:
            url, argument_password = split_password(url)
            argument = f"{option}={url}"
        elif cleaned and cleaned[-1] == _URL_OPTION:
            argument, argument_password = split_password(argument)
        if argument_password is not None:
            password = argument_password
        cleaned.append(argument)
    return cleaned, password


def hide_secrets() -> None:
    """Execute the command again without the secrets that other processes could read, if there are any.

    Every user of the machine may read the command line of a process, and every process of the same user may read the
    environment with which it started. A password in rendezvous.url moves into the environment, which trainers inherit.
    An agent's job secret moves into a pipe, which the agent reads once. A forked process does nothing here, because its
    command line is that of its parent.
    """
    arguments, password = remove_password(sys.orig_argv)
    if sys.argv[1:2] == ["agent"]:
        job_secret = os.environ.get(JOB_SECRET_VARIABLE)
    else:
        job_secret = None
    if password is None and job_secret is None:
        return
    own_arguments = sys.argv[1:]
    started_arguments = sys.orig_argv[len(sys.orig_argv) - len(own_arguments) :]
    if own_arguments != started_arguments:
        return  # a forked process
    if password is not None:
        os.environ[PASSWORD_VARIABLE] = password
    if job_secret is not None:
        del os.environ[JOB_SECRET_VARIABLE]
        os.environ[_JOB_SECRET_PIPE] = str(_fill_pipe(job_secret.encode()))
    os.execv(sys.executable, arguments)


def take_job_secret() -> str:
    """Return the job's secret from this process's environment and remove it there; return "" if there is none."""
    pipe = os.environ.pop(_JOB_SECRET_PIPE, "")
    secret = os.environ.pop(JOB_SECRET_VARIABLE, "")
    if pipe.isdecimal():
        with open(int(pipe), "rb") as file:
            secret = file.read(_PIPE_BYTES).decode()
    return secret


def _fill_pipe(data: bytes) -> int:
    """Return the read end of a pipe that holds `data` and that the next program inherits."""
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    with open(write_end, "wb") as file:
        file.write(data[:_PIPE_BYTES])
    return read_end
