"""A disk that is busy until the test releases it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# fsync and fdatasync that wait for a busy disk once BUSY_DISK names a pipe, until the pipe is opened for writing. Each
# call appends its name and the path of its file to the file FLUSHES.
_SOURCE = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int flush(int file, const char *name, long call) {
    char link[64], path[4096];
    const char *pipe = getenv("BUSY_DISK");
    if (pipe) close(open(pipe, O_RDONLY));
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path);
    int log = open(getenv("FLUSHES"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dprintf(log, "%s %.*s\\n", name, (int)length, path);
    close(log);
    return syscall(call, file);
}

int fsync(int file) { return flush(file, "fsync", SYS_fsync); }
int fdatasync(int file) { return flush(file, "fdatasync", SYS_fdatasync); }
"""


def make_busy_disk(folder: Path) -> dict[str, str]:
    """Return an environment for processes whose flushes wait once BUSY_DISK is the path of FOLDER/pipe.

    FOLDER/flushes lists the flushes that have ended.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a disk that is busy")
    library = folder / "busy_disk.so"
    source = folder / "busy_disk.c"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    os.mkfifo(folder / "pipe")
    return os.environ | {"LD_PRELOAD": str(library), "FLUSHES": str(folder / "flushes")}
