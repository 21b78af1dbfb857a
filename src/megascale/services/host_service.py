"""The life cycle of a host's services: one process per private folder, started on demand, ended when unused.

A service owns a folder that only its user may enter. The process that holds the folder's lock serves, and its socket
lies next to the lock. `connect_service` (the client) finds the service or starts it. `claim_service` (the service)
takes the lock, listens and reports that it is ready; `ServiceLocation.release` removes its files at the end. The kernel
releases the lock of a killed process, so a killed service never blocks the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.python_process import module_command
from megascale.errors import TrainingError
from megascale.services.conversation import Conversation, Done, ErrorReply, check_peer, peer_credentials
from megascale.services.framing import ProtocolError
from megascale.services.messages import Count, FrameReader, Message, Name, Schema
from megascale.services.reception import AUTHENTICATION_TIMEOUT, ConnectionServer

_MAX_ADDRESS_BYTES = 107  # of a path in an AF_UNIX address
START_TIMEOUT = 60.0  # seconds that a service has from its start to its first reply


class ConnectRequest(Message, frozen=True):
    """Ask for a service by name."""

    service: Name


class ConnectReply(Message, frozen=True):
    """Accept a client; `pid` is the service's process id."""

    pid: Count


GREETINGS = Schema(ConnectRequest, ConnectReply, Done, ErrorReply, limit=16384)


class ServiceFailed(Exception):
    """A service could not start.

    Attributes:
        kind: name of its error's class; the message is its error's.
    """

    def __init__(self, error: str, kind: str) -> None:
        super().__init__(error)
        self.kind = kind


# Private folders --------------------------------------------------------------------------------------------------


def private_base_folder() -> Path:
    """Return this user's private folder within the machine's temporary folder (see `make_private_folder`)."""
    return make_private_folder(Path(tempfile.gettempdir()) / f"megascale-{os.getuid()}")


def make_private_folder(path: Path) -> Path:
    """Return a folder of this user that no other user may enter; create it if it is missing.

    Sockets in it need no token: every process that can reach them is trusted. Raises TrainingError if the path belongs
    to another user, is not a folder, or can be written by other users.
    """
    info = _make_folder(path)
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
        raise TrainingError(f"{path} is not a folder of this user; remove it or set TMPDIR to a folder of your own")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise TrainingError(f"{path} can be written by others; remove it or set TMPDIR to a folder of your own")
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _make_folder(path: Path) -> os.stat_result:
    """Make a folder if it is missing and return its status; retry, since a service that ends may remove it."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):
            return path.lstat()


@dataclass(frozen=True)
class ServiceLocation:
    """The private folder and the name of a service."""

    folder: Path
    name: str

    @property
    def address(self) -> Path:
        """Return the path of its socket."""
        return self.folder / f"{self.name}.sock"

    @property
    def lock(self) -> Path:
        """Return the path of the lock that the serving process holds."""
        return self.folder / f"{self.name}.lock"

    @property
    def starting(self) -> Path:
        """Return the path of the lock that a starting process holds until the service replies."""
        return self.folder / f"{self.name}.starting"

    def acquire_lock(self, make: bool = True, make_folder: bool = False) -> int | None:
        """Return the lock's file descriptor, or None if another process holds it.

        Args:
            make: create the lock if it is missing; False: return None then.
            make_folder: create the folder if it is missing.
        """
        while True:
            if make_folder:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
            try:
                lock = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600)
            except FileNotFoundError:
                if make_folder:
                    continue  # a service that ended has just removed the folder
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(self.lock)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            except FileNotFoundError:
                pass
            # The holder ended between `open` and `flock` and removed the file, so this lock excludes no process.
            os.close(lock)

    def release(self, lock: int) -> None:
        """Remove the service's files while no process can connect, then release the lock."""
        for path in (self.address, self.starting, self.lock):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds other files, or a client is just connecting
            self.folder.rmdir()
        os.close(lock)

    @contextlib.contextmanager
    def _short_address(self) -> Iterator[str]:
        """Yield a path of the socket that fits an AF_UNIX address, however long the folder's path is.

        Raises OSError where the folder cannot be opened or the system has no /proc.
        """
        path = str(self.address)
        if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
            yield path
            return
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not os.path.isdir(f"/proc/self/fd/{folder}"):
                text = f"the path of a socket is longer than {_MAX_ADDRESS_BYTES} bytes; set TMPDIR to a shorter folder"
                raise OSError(errno.ENAMETOOLONG, text, path)
            yield f"/proc/self/fd/{folder}/{self.address.name}"
        finally:
            os.close(folder)

    def listen(self) -> socket.socket:
        """Return a listening socket at the address; it replaces the socket file of a killed service."""
        self.address.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short_address() as path:
                listener.bind(path)
            listener.listen(256)
        except OSError:
            listener.close()
            raise
        return listener

    def open_socket(self) -> socket.socket | None:
        """Return a connection to the listening process, None if no process listens. It may be about to end."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short_address() as path:
                sock.connect(path)
            return sock
        except OSError:
            sock.close()
            return None

    def owner_pid(self) -> int | None:
        """Return the process id of the service, None if no process listens."""
        sock = self.open_socket()
        if sock is None:
            return None
        with sock:
            return peer_credentials(sock)[0]

    def open_conversation(self, outgoing: Schema, incoming: Schema, seconds: float) -> Conversation | None:
        """Return a conversation with the service, None if no service replies within `seconds`.

        Raises ProtocolError if the process belongs to another user or speaks another version of the protocol.
        """
        sock = self.open_socket()
        if sock is None:
            return None
        greeting = Conversation(sock, GREETINGS, GREETINGS)
        try:
            check_peer(sock)
            with greeting.time_limit(seconds):
                # A service that is ending, or was killed, may still accept connections: only a reply counts.
                if isinstance(greeting.request(ConnectRequest(self.name)), ConnectReply):
                    return Conversation(sock, outgoing, incoming)
            raise ProtocolError(f"the process that listens on {str(self.address)!r} is not a {self.name} service")
        except ProtocolError:
            sock.close()
            raise
        except OSError:
            sock.close()
            return None

    def remove_leftovers(self) -> None:
        """Remove the files of killed services of this name in the neighbouring folders."""
        for lock_path in self.folder.parent.glob(f"*/{self.lock.name}"):
            location = ServiceLocation(lock_path.parent, self.name)
            with contextlib.suppress(OSError):
                lock = location.acquire_lock(make=False)
                if lock is not None:
                    location.release(lock)


# The client's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """The command that starts a service: a module that calls `claim_service`.

    Attributes:
        module: name of the module.
        arguments: its command-line arguments.
        log: file for its output.
        environment: variables added to its environment.
    """

    module: str
    arguments: Sequence[str]
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def spawn(self, *extra_arguments: str, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start the process in its own session: a terminal's interrupt must not end it with the trainers."""
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


def start_service(location: ServiceLocation, launch: Launch) -> subprocess.Popen[bytes]:
    """Start a service and return at once; a client that connects meanwhile waits for it and starts no second one."""
    with open(location.starting, "ab") as lock:
        # The child inherits the lock and closes it when it is ready.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return launch.spawn("--starting", str(lock.fileno()), files=[lock.fileno()])


def connect_service(
    location: ServiceLocation,
    launch: Launch,
    outgoing: Schema,
    incoming: Schema,
    *,
    seconds: float = START_TIMEOUT,
    make_folder: bool = False,
) -> Conversation:
    """Return a conversation with the service at `location`; start it if it is not running.

    Args:
        make_folder: create the folder if it is missing; False: raise FileNotFoundError then.

    Raises ServiceFailed with the error that kept it from starting, TimeoutError if it does not reply in time.
    """
    deadline = time.monotonic() + seconds
    pause = 0.02
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with _hold_lock(location.starting, remaining):
                conversation = location.open_conversation(outgoing, incoming, remaining)
                if conversation is not None:
                    return conversation
                _start_and_wait(launch, deadline)
                remaining = max(0.1, deadline - time.monotonic())
                conversation = location.open_conversation(outgoing, incoming, remaining)
                if conversation is not None:
                    return conversation
        except FileNotFoundError:  # a service that ends removes its folder
            if not make_folder:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(location.folder, 0o700)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 2.0)  # so that a service that fails silently is not started a thousand times
    raise TimeoutError(f"nothing answers on {str(location.address)!r} within {seconds:g} s")


def _start_and_wait(launch: Launch, deadline: float) -> None:
    """Start a service and return when it is ready or has ended. Raises ServiceFailed with the error it reports."""
    receive_end, send_end = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            child = launch.spawn("--ready", str(send_end), files=[send_end])
        finally:
            os.close(send_end)
        data = b""
        poller = select.poll()  # select() accepts no descriptor above 1,023
        poller.register(receive_end, select.POLLIN)
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            received = os.read(receive_end, 65536)
            if not received:
                break
            data += received
        child.poll()
    finally:
        os.close(receive_end)
    for message in FrameReader(GREETINGS).feed(data):
        if isinstance(message, ErrorReply):
            child.wait()
            raise ServiceFailed(message.error, message.kind)


@contextlib.contextmanager
def _hold_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock at `path` in the body. Raises TimeoutError if another process holds it for longer."""
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
    """Reports to the starting process that a service is ready, or why it cannot start.

    Args:
        pipe: file descriptor of the pipe that `connect_service` reads, None if there is none.
        lock: file descriptor of the lock that `start_service` took, None if there is none.
    """

    def __init__(self, pipe: int | None, lock: int | None) -> None:
        self._pipe = pipe
        self._lock = lock

    def send(self, message: Message | None = None) -> None:
        """Report readiness, or the ErrorReply `message`; call it once."""
        frame = GREETINGS.encode_frame(message or Done())
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the starting process may have died
                os.write(self._pipe, frame)
        for handle in (self._pipe, self._lock):
            if handle is not None:
                os.close(handle)
        self._pipe = None
        self._lock = None


@dataclass(frozen=True)
class ClaimedService:
    """A service that this process runs.

    Attributes:
        location: its folder and name.
        lock: file descriptor of its lock.
        reception: serves its clients.
    """

    location: ServiceLocation
    lock: int
    reception: ConnectionServer


def claim_service(
    location: ServiceLocation,
    begin: Callable[[], Callable[[Conversation], None]],
    schemas: tuple[Schema, Schema],
    ready: ReadySignal,
    *,
    make_folder: bool = False,
) -> ClaimedService | None:
    """Take the lock and the socket of a service. Returns None if another process has the lock.

    Args:
        begin: called once the lock is held; returns the function that serves a client's conversation.
        schemas: messages that the service sends, and those that it accepts.
        ready: signalled when clients can connect.
        make_folder: create the folder if it is missing.
    """
    lock = location.acquire_lock(make_folder=make_folder)
    if lock is None:
        return None
    _raise_file_limit()
    try:
        handle = begin()
        listener = location.listen()
    except OSError as error:  # without the reason, the waiting process would start this service again and again
        ready.send(ErrorReply(f"the {location.name} service cannot start: {error}"[:2000], "TrainingError"))
        raise
    greeter = _Greeter(location.name, schemas)
    reception = ConnectionServer(listener, greeter.greet, handle)
    ready.send()
    return ClaimedService(location, lock, reception)


@dataclass(frozen=True)
class _Greeter:
    """Accepts clients of this user that ask for the service by its name."""

    service: str
    schemas: tuple[Schema, Schema]

    def greet(self, sock: socket.socket) -> Conversation:
        """Check a client and return the conversation with it. Raises ProtocolError for any other client."""
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
    """Raise the soft limit of open files towards the hard limit, to at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; end now if it has ended already (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
