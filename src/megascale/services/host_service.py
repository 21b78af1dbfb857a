"""Life cycle of a host's services: each is a process that a client starts on demand and that ends when unused.

A service has a folder that only its user may enter (service_location.py). The process that holds the lock file in the
folder is the service, and its socket is in the same folder. A client calls `connect_service`, which connects to the
service or starts it. The service calls `claim_service`, which takes the lock, listens and reports that the service is
ready. At its end the service calls `ServiceLocation.release`, which removes its files. The kernel releases the lock of
a killed process, so a killed service never blocks the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.python_process import module_command
from megascale.services.connection_server import AUTHENTICATION_TIMEOUT, ConnectionServer
from megascale.services.conversation import Conversation, Done, ErrorReply, check_peer
from megascale.services.framing import ProtocolError
from megascale.services.messages import FrameReader, Message, Schema
from megascale.services.service_location import GREETINGS, ConnectReply, ConnectRequest, ServiceLocation

START_TIMEOUT = 60.0  # seconds from the start of a service to its first reply


class ServiceFailed(Exception):
    """Error for a service that could not start, with the message of the service's error.

    Attributes:
        kind: name of the class of the service's error.
    """

    def __init__(self, error: str, kind: str) -> None:
        super().__init__(error)
        self.kind = kind


# The client's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Command that starts a service.

    Attributes:
        module: name of a module that calls `claim_service`.
        arguments: command-line arguments of the module.
        log: file for the output of the service. Default: the output is discarded.
        environment: environment variables of the service besides those of this process.
    """

    module: str
    arguments: Sequence[str]
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def spawn(self, *extra_arguments: str, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start the process with `files` open.

        The process gets its own session, so that an interrupt from the terminal does not end it with the trainers.
        """
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log or os.devnull, "ab") as out:
            return subprocess.Popen(
                module_command(self.module, *self.arguments, *extra_arguments),
                pass_fds=tuple(files),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | self.environment,
            )


def start_service(location: ServiceLocation, launch: Launch, *, make_folder: bool = False) -> subprocess.Popen[bytes]:
    """Start a service and return at once.

    A client that connects before the service is ready waits and does not start a second service.

    Args:
        make_folder: whether to create the folder if it is missing. Otherwise a missing folder raises FileNotFoundError.
    """
    while True:
        try:
            lock_file = open(location.starting_lock_path, "ab")  # noqa: SIM115 - the loop repeats only the opening
            break
        except FileNotFoundError:  # a service that ends, or a refused start, removes the folder
            if not make_folder:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(location.folder, 0o700)
    with lock_file:
        # The child inherits the lock and releases it when it is ready.
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        return launch.spawn("--starting", str(lock_file.fileno()), files=[lock_file.fileno()])


def connect_service(
    location: ServiceLocation,
    launch: Launch,
    outgoing: Schema,
    incoming: Schema,
    *,
    seconds: float = START_TIMEOUT,
    make_folder: bool = False,
) -> Conversation:
    """Return a conversation with the service at `location`. Start the service if it is not running.

    Args:
        launch: command that starts the service.
        outgoing: messages that this process sends.
        incoming: messages that this process accepts.
        seconds: limit for the start and the first reply.
        make_folder: whether to create the folder if it is missing. Otherwise a missing folder raises FileNotFoundError.

    Raises:
        ServiceFailed: the service reported an error instead of starting.
        TimeoutError: the service did not reply within `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = 0.02  # doubled after each attempt, so that a service that fails silently is started only a few times
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"no service replies on {str(location.socket_path)!r} within {seconds:g} s")
        try:
            with _hold_lock(location.starting_lock_path, remaining):
                conversation = location.open_conversation(outgoing, incoming, remaining)
                if conversation is not None:
                    return conversation
                _start_and_wait(launch, deadline)
                remaining = max(0.1, deadline - time.monotonic())  # a service that is ready late may still reply
                conversation = location.open_conversation(outgoing, incoming, remaining)
                if conversation is not None:
                    return conversation
        except FileNotFoundError:  # a service that ends removes its folder
            if not make_folder:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(location.folder, 0o700)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 2.0)


def find_service(
    location: ServiceLocation, outgoing: Schema, incoming: Schema, *, seconds: float
) -> Conversation | None:
    """Return a conversation with the service at `location`, or None if no service runs.

    A service that is starting counts as running. Arguments are those of `connect_service`.

    Raises:
        TimeoutError: the service is still starting after `seconds`.
    """
    if not location.starting_lock_path.exists() and not location.socket_path.exists():
        return None
    try:
        with _hold_lock(location.starting_lock_path, seconds):
            return location.open_conversation(outgoing, incoming, seconds)
    except FileNotFoundError:  # a service that ends removes its folder
        return None


def _start_and_wait(launch: Launch, deadline: float) -> None:
    """Start a service, and return when it is ready or has ended. Raises ServiceFailed if it reports an error."""
    receive_end, send_end = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            child = launch.spawn("--ready", str(send_end), files=[send_end])
        finally:
            os.close(send_end)
        data = b""
        poller = select.poll()  # select() accepts no descriptor above 1,023
        poller.register(receive_end, select.POLLIN)
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):  # milliseconds
            received = os.read(receive_end, 65536)
            if not received:  # The service has closed its end of the pipe: it is ready, or has ended.
                break
            data += received
        child.poll()  # This call reaps the process of a service that has ended.
    finally:
        os.close(receive_end)
    for message in FrameReader(GREETINGS).feed(data):
        if isinstance(message, ErrorReply):
            child.wait()
            raise ServiceFailed(message.error, message.kind)


@contextlib.contextmanager
def _hold_lock(path: Path, seconds: float) -> Iterator[None]:
    """Keep the file at `path` locked in the body. Raises TimeoutError if it stays locked elsewhere for `seconds`."""
    deadline = time.monotonic() + seconds
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been starting {path.stem} for {seconds:g} s") from None
                time.sleep(0.01)
        yield


# The service's side -----------------------------------------------------------------------------------------------


class ReadySignal:
    """Signal of a new service to the process that started it: the service is ready, or it cannot start.

    A service started by `connect_service` reports through a pipe, its option --ready. A service started by
    `start_service` releases a lock, its option --starting, for which clients wait.

    Args:
        pipe: file descriptor of the pipe's end for writing, or None.
        lock: file descriptor of the inherited lock, or None.
    """

    def __init__(self, pipe: int | None, lock: int | None) -> None:
        self._pipe = pipe
        self._lock = lock

    def send(self, message: Message | None = None) -> None:
        """Report that the service is ready, or the failure in `message`. Only the first call has an effect."""
        frame = GREETINGS.encode_frame(message or Done())
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the starting process may have died
                os.write(self._pipe, frame)
        for descriptor in (self._pipe, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._pipe = None
        self._lock = None


@dataclass(frozen=True)
class ClaimedService:
    """Service that this process runs.

    Attributes:
        location: folder and name of the service.
        lock: file descriptor of the lock file.
        server: accepts and serves the clients.
    """

    location: ServiceLocation
    lock: int
    server: ConnectionServer


def claim_service(
    location: ServiceLocation,
    initialise_service: Callable[[], Callable[[Conversation], None]],
    schemas: tuple[Schema, Schema],
    ready: ReadySignal,
    *,
    make_folder: bool = False,
) -> ClaimedService | None:
    """Take the lock of a service and listen on its socket. Return None if another process has the lock.

    Args:
        initialise_service: called once this process has the lock. Returns the function that serves the conversation
            with a client.
        schemas: messages that the service sends, and messages that it accepts.
        ready: sent when clients can connect, or with the error if the service cannot start.
        make_folder: whether to create the folder if it is missing.
    """
    lock = location.acquire_lock(make_folder=make_folder)
    if lock is None:
        return None
    _raise_file_limit()
    try:
        serve_client = initialise_service()
        listener = location.listen()
    except OSError as error:
        # Without this reply the waiting client would start the service again and again.
        ready.send(ErrorReply(f"the {location.name} service cannot start: {error}"[:2000], "TrainingError"))
        raise
    greeter = _Greeter(location.name, schemas)
    server = ConnectionServer(listener, greeter.greet, serve_client)
    ready.send()
    return ClaimedService(location, lock, server)


@dataclass(frozen=True)
class _Greeter:
    """Check of new clients: they must belong to this user or to root and ask for this service by name."""

    service: str
    schemas: tuple[Schema, Schema]

    def greet(self, sock: socket.socket) -> Conversation:
        """Check a client and return the conversation with it. Raises ProtocolError if the client fails the check."""
        check_peer(sock)
        greeting = Conversation(sock, GREETINGS, GREETINGS)
        with greeting.time_limit(AUTHENTICATION_TIMEOUT):
            request = greeting.receive()
            if not isinstance(request, ConnectRequest) or request.service != self.service:
                greeting.send(ErrorReply(f"this is the {self.service} service", "ProtocolError"))
                raise ProtocolError("the client asked for another service")
            greeting.send(ConnectReply(os.getpid()))
        outgoing, incoming = self.schemas
        return Conversation(sock, outgoing, incoming)


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, but to at most 65,536: each client needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux). End this process if the parent has ended already.

    parent: process id of the parent, read before a fork or passed by the parent.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
