"""The life of a service of a host: one a folder, started by whoever needs it first, gone when nobody does.

A service owns a folder that only its user may enter. Whoever holds the folder's lock serves; its socket lies beside the
lock. `connect` (whoever needs it) finds it or starts it; `own` (the service) takes the lock, listens, says that it is
ready, and removes what it had when it ends. A lock is the kernel's: nothing that was killed keeps anybody out.
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
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.python_command import module_command
from megascale.services.conversation import Conversation, Done, ErrorReply, check_peer, peer_credentials
from megascale.services.framing import HEAD, ProtocolError, make_head, read_head
from megascale.services.messages import Count, Message, Name, Schema
from megascale.services.reception import AUTHENTICATION_TIMEOUT, Reception

_LONGEST_ADDRESS = 107  # bytes of a path in an AF_UNIX address
COME_UP = 60.0  # seconds that a service has from its start to its first answer


class Come(Message, frozen=True):
    """Somebody needs a service."""

    service: Name


class Here(Message, frozen=True):
    """It is here: its process id."""

    pid: Count


GREETINGS = Schema(Come, Here, Done, ErrorReply, limit=16384)


class ServiceFailed(Exception):
    """A service could not start; `kind` is the class of its error, the message its words."""

    def __init__(self, error: str, kind: str) -> None:
        super().__init__(error)
        self.kind = kind


@dataclass(frozen=True)
class ServiceLocation:
    """Where a service lives: a private folder (private_folder.py) and the service's name."""

    folder: Path
    name: str

    @property
    def address(self) -> Path:
        """Its socket."""
        return self.folder / f"{self.name}.sock"

    @property
    def lock(self) -> Path:
        """Held by the process that serves."""
        return self.folder / f"{self.name}.lock"

    @property
    def starting(self) -> Path:
        """Held by who starts a service, until it answers."""
        return self.folder / f"{self.name}.starting"

    def acquire_lock(self, make: bool = True, make_folder: bool = False) -> int | None:
        """The lock, None if a process has it (or there is none and it is not to be made)."""
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
            # Its holder has ended between our two calls, and removed it: what we hold keeps nobody out.
            os.close(lock)

    def release(self, lock: int) -> None:
        """Remove what a service leaves, while nobody else can come, and let go."""
        for path in (self.address, self.starting, self.lock):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there is more in it, or somebody comes just now
            self.folder.rmdir()
        os.close(lock)

    @contextlib.contextmanager
    def _short_address(self) -> Iterator[str]:
        """Yield a path of the socket that fits an AF_UNIX address, whatever the length of the folder's path.

        Raises OSError where the folder cannot be opened or the system has no /proc.
        """
        path = str(self.address)
        if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
            yield path
            return
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not os.path.isdir(f"/proc/self/fd/{folder}"):
                text = f"the path of a socket is longer than {_LONGEST_ADDRESS} bytes; set TMPDIR to a shorter folder"
                raise OSError(errno.ENAMETOOLONG, text, path)
            yield f"/proc/self/fd/{folder}/{self.address.name}"
        finally:
            os.close(folder)

    def listen(self) -> socket.socket:
        """Return a listening socket at the address, in place of one that a killed service has left."""
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

    def reach(self) -> socket.socket | None:
        """A connection to the process that listens, None if none does. It may be about to end."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short_address() as path:
                sock.connect(path)
            return sock
        except OSError:
            sock.close()
            return None

    def owner(self) -> int | None:
        """Process id of the service, None if none listens."""
        if (sock := self.reach()) is None:
            return None
        with sock:
            return peer_credentials(sock)[0]

    def meet(self, out: Schema, into: Schema, seconds: float) -> Conversation | None:
        """A conversation with the service, None if there is none that answers within `seconds`.

        ProtocolError if what answers is another user's or speaks another form of the protocol.
        """
        if (sock := self.reach()) is None:
            return None
        greeting = Conversation(sock, GREETINGS, GREETINGS)
        try:
            check_peer(sock)
            with greeting.time_limit(seconds):
                # One that is just ending, or was killed, may still take connections: only an answer counts.
                if isinstance(greeting.request(Come(self.name)), Here):
                    return Conversation(sock, out, into)
            raise ProtocolError(f"what answers on {str(self.address)!r} is no {self.name} service")
        except ProtocolError:
            sock.close()
            raise
        except OSError:
            sock.close()
            return None

    def sweep(self) -> None:
        """Remove what killed services of this name have left in the folders beside this one."""
        for other in self.folder.parent.glob(f"*/{self.lock.name}"):
            place = ServiceLocation(other.parent, self.name)
            with contextlib.suppress(OSError):
                if (lock := place.acquire_lock(make=False)) is not None:
                    place.release(lock)


@dataclass(frozen=True)
class Launch:
    """How to start a service: a module that calls `own`, its arguments, its log and what to add to its environment."""

    module: str
    arguments: Sequence[str]
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def spawn(self, *words: str, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """In a session of its own: a terminal's interrupt is for trainers, and some services outlive them."""
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log or os.devnull, "ab") as out:
            return subprocess.Popen(
                module_command(self.module, *self.arguments, *words),
                pass_fds=tuple(files),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | self.environment,
            )


def start_service(place: ServiceLocation, launch: Launch) -> subprocess.Popen[bytes]:
    """Start a service without waiting for it; who connects meanwhile does wait, and starts no other."""
    with open(place.starting, "ab") as lock:
        # The child inherits the lock and drops it when it is ready.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return launch.spawn("--starting", str(lock.fileno()), files=[lock.fileno()])


def connect_service(
    place: ServiceLocation,
    launch: Launch,
    out: Schema,
    into: Schema,
    *,
    seconds: float = COME_UP,
    make_folder: bool = False,
) -> Conversation:
    """A conversation with the service of `place`, which is started if none runs.

    make_folder: make the folder if it is not there; else that is a FileNotFoundError.

    Raises ServiceFailed with what kept it from starting, TimeoutError if it does not come up in time.
    """
    deadline, pause = time.monotonic() + seconds, 0.02
    while (left := deadline - time.monotonic()) > 0:
        try:
            with _locked(place.starting, left):
                # Within a second, for one that is stopped; the next look then takes what is left.
                if (conversation := place.meet(out, into, left)) is not None:
                    return conversation
                _start_and_wait(launch, deadline)
                if (conversation := place.meet(out, into, max(0.1, deadline - time.monotonic()))) is not None:
                    return conversation
        except FileNotFoundError:  # a service that ends removes its folder
            if not make_folder:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(place.folder, 0o700)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 2.0)  # what ends without a word at every start is not started a thousand times
    raise TimeoutError(f"nothing answers on {str(place.address)!r} within {seconds:g} s")


def _start_and_wait(launch: Launch, deadline: float) -> None:
    """Returns when the child is ready or has ended; ServiceFailed with its words if it says why."""
    told, tell = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            child = launch.spawn("--ready", str(tell), files=[tell])
        finally:
            os.close(tell)
        data = b""
        poller = select.poll()  # select() takes no descriptor above 1,023
        poller.register(told, select.POLLIN)
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000) and (got := os.read(told, 65536)):
            data += got
        child.poll()
    finally:
        os.close(told)
    if len(data) > HEAD.size:
        read_head(data[: HEAD.size], GREETINGS.limit)
        word = GREETINGS.decode(data[HEAD.size :])
        if isinstance(word, ErrorReply):
            child.wait()
            raise ServiceFailed(word.error, word.kind)


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock at `path`; TimeoutError if another does for longer."""
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


# the service's side -----------------------------------------------------------------------------------------------


class Ready:
    """How a service tells who started it that it is ready, or what keeps it from starting.

    Args:
        ready: a pipe of who waits, `starting`: the lock of `start`; None where there is none.
    """

    def __init__(self, ready: int | None, starting: int | None) -> None:
        self._pipe, self._lock = ready, starting

    def send(self, message: Message | None = None) -> None:
        """Once: ready, or ErrorReply."""
        data = GREETINGS.encode(message or Done())
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # who started this has died meanwhile
                os.write(self._pipe, make_head(len(data)) + data)
        for handle in (self._pipe, self._lock):
            if handle is not None:
                os.close(handle)
        self._pipe = self._lock = None


def claim_service(
    place: ServiceLocation,
    begin: Callable[[], Callable[[Conversation], None]],
    schemas: tuple[Schema, Schema],
    ready: Ready,
    *,
    make_folder: bool = False,
) -> Owned | None:
    """Take the place of a service: its lock and its socket. None if another process has it.

    Args:
        begin: called with the lock held; returns what talks with each who comes.
        schemas: what this end says, and accepts.
        ready: told when connections are taken.
        make_folder: make the folder if it is not there.
    """
    lock = place.acquire_lock(make_folder=make_folder)
    if lock is None:
        return None
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 65536)), most))
    try:
        talk = begin()
        listener = place.listen()
    except OSError as error:  # without the reason, the process that waits would start this service again and again
        ready.send(ErrorReply(f"the {place.name} service cannot start: {error}"[:2000], "TrainingError"))
        raise

    def meet(sock: socket.socket) -> Conversation:
        check_peer(sock)
        greeting = Conversation(sock, GREETINGS, GREETINGS)
        with greeting.time_limit(AUTHENTICATION_TIMEOUT):
            come = greeting.receive()
            if not isinstance(come, Come) or come.service != place.name:
                greeting.send(ErrorReply(f"this is the {place.name} service", "ProtocolError"))
                raise ProtocolError("it asked for another service")
            greeting.send(Here(os.getpid()))
        return Conversation(sock, *schemas)

    reception = Reception(listener, meet, talk)
    ready.send()
    return Owned(place, lock, reception)


@dataclass(frozen=True)
class Owned:
    """A place that this process serves."""

    location: ServiceLocation
    lock: int
    reception: Reception


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; end now if it is gone already (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
