"""Preparation of a foreign trainer's rank for the diagnosis. Python imports this module when the rank starts.

The module needs only the standard library, because the trainer may use another environment. It answers two requests,
even while the main thread is blocked. A signal requests the stack, and opening a pipe requests the calls of torch's
flight recorder. Neither request needs ptrace.
"""

import faulthandler
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import time

STACK_SIGNAL = signal.SIGRTMIN + 13  # no library is known to use it
_RETRY_SECONDS = 0.1  # after a failure to write the flight record


def _run_shadowed_module() -> None:
    """Run the sitecustomize of the environment, which this module shadows."""
    this_folder = os.path.dirname(os.path.abspath(__file__))
    folders = [folder for folder in sys.path if os.path.abspath(folder) != this_folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _read_birth_ticks() -> str:
    """Return when this process started, in clock ticks since boot."""
    with open("/proc/self/stat", "rb") as file:
        fields_after_name = file.read().rpartition(b")")[2].split()
    return fields_after_name[19].decode()  # `starttime` of proc(5)


def _claim_rank(prefix: str) -> bool:
    """Register this process as the rank's, and return False if a parent has done so, such as a launcher in Python."""
    try:
        descriptor = os.open(prefix + ".process", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    host = os.uname().nodename
    os.write(descriptor, f"{os.getpid()} {_read_birth_ticks()} {host}\n".encode())
    os.close(descriptor)
    return True


def _answer_requests(pipe: str, flight: str) -> None:
    """Write torch's flight record whenever another process opens the pipe. Return once the pipe is removed."""
    while True:
        try:
            with open(pipe) as file:  # sleeps until a writer opens the pipe
                file.read()
            temporary = flight + ".tmp"
            with open(temporary, "w") as file:
                file.write(_dump_flight_recorder())
            os.replace(temporary, flight)
        except OSError:
            if not os.path.exists(pipe):
                return
            time.sleep(_RETRY_SECONDS)


def _dump_flight_recorder() -> str:
    """Return the recorded calls as JSON: those of NCCL, or else of gloo. CUDA builds have a recorder for each."""
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(module, name, None)
        records = dump() if dump is not None else ""
        text = records.decode() if isinstance(records, bytes) else records
        if '"entries"' in text:
            return text
    return '{"entries": [], "pg_config": {}}'


def _prepare_rank() -> None:
    """Register the handler of the signal and start the thread that answers the pipe."""
    rank = os.environ.get("RANK", "")
    status = os.environ.get("MEGASCALE_STATUS", "")
    if not rank.isdigit() or not os.path.isdir(status):
        return
    prefix = os.path.join(status, f"rank-{rank}")
    stacks = open(prefix + ".stack", "a")  # noqa: SIM115 - stays open until the process ends
    # Other threads would change their frames while faulthandler reads them, so it writes only the main thread's stack.
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    if not _claim_rank(prefix):
        return
    pipe = prefix + ".ask"
    os.mkfifo(pipe, 0o600)
    flight = os.path.join(os.environ["MEGASCALE_FLIGHT"], f"rank-{rank}.json")
    arguments = (pipe, flight)
    threading.Thread(target=_answer_requests, args=arguments, name="megascale-flight", daemon=True).start()


try:
    _prepare_rank()
except (OSError, ValueError, KeyError) as error:
    print(f"megascale: this rank cannot be asked for its stack: {error!r}", file=sys.stderr)
_run_shadowed_module()
