"""Location of a host's service: its private folder, and its socket and lock files in that folder.

Only the service's user may enter the folder. The process that holds the lock file is the service (host_service.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megascale.errors import TrainingError
from megascale.services.conversation import Conversation, Done, ErrorReply, check_peer, read_peer_credentials
from megascale.services.framing import ProtocolError
from megascale.services.messages import Count, Message, Name, Schema

_MAX_ADDRESS_BYTES = 107  # longest path in an AF_UNIX address: Linux has 108 bytes for it, with a 0 at the end


class ConnectRequest(Message, frozen=True):
    """Request of a client for a service by name, the first message of a connection."""

    service: Name


class ConnectReply(Message, frozen=True):
    """Reply of a service that accepts the client. `pid` is the service's process id."""

    pid: Count


GREETINGS = Schema(ConnectRequest, ConnectReply, Done, ErrorReply, limit=16384)  # largest message in bytes


def make_private_base_folder() -> Path:
    """Return this user's private folder in the temporary folder, made if it is missing (see `make_private_folder`)."""
    return make_private_folder(Path(tempfile.gettempdir()) / f"megascale-{os.getuid()}")


def make_private_folder(path: Path) -> Path:
    """Return `path` as a folder of this user that no other user may enter. Create it if it is missing.

    Sockets in the folder need no token, because only trusted processes can reach them.

    Raises:
        TrainingError: the path belongs to another user, is not a folder, or other users may write to it.
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
    """Make a folder if it is missing, and return its status.

    A service that ends may remove the folder between the two calls, which are then repeated.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):
            return path.lstat()


@dataclass(frozen=True)
class ServiceLocation:
    """Private folder and name of a service, from which the paths of its files follow."""

    folder: Path
    name: str

    @property
    def socket_path(self) -> Path:
        """Return the path of the socket on which the service listens."""
        return self.folder / f"{self.name}.sock"

    @property
    def lock_path(self) -> Path:
        """Return the path of the file that the service keeps locked."""
        return self.folder / f"{self.name}.lock"

    @property
    def starting_lock_path(self) -> Path:
        """Return the path of the file that a process keeps locked while it starts the service."""
        return self.folder / f"{self.name}.starting"

    def acquire_lock(self, make: bool = True, make_folder: bool = False) -> int | None:
        """Lock the lock file, and return its file descriptor, or None if another process has locked it.

        Args:
            make: whether to create the lock file if it is missing. Otherwise a missing file gives None.
            make_folder: whether to create the folder if it is missing.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        if make:
            flags |= os.O_CREAT
        while True:
            if make_folder:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
            try:
                lock = os.open(self.lock_path, flags, 0o600)
            except FileNotFoundError:
                if make_folder:
                    continue  # a service that ended has just removed the folder
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(self.lock_path)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            except FileNotFoundError:  # raised by os.stat
                pass
            # The service ended between `open` and `flock` and removed the file. A lock of the removed file excludes no
            # process that locks a new file at this path.
            os.close(lock)

    def release(self, lock: int) -> None:
        """Remove the service's files, which ends new connections, and then release the lock."""
        for path in (self.socket_path, self.starting_lock_path, self.lock_path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has other files, or a client is just connecting
            self.folder.rmdir()
        os.close(lock)

    @contextlib.contextmanager
    def _short_address(self) -> Iterator[str]:
        """Yield a path of the socket that is short enough for an AF_UNIX address.

        If the path is too long, the yielded path goes through /proc and a descriptor of the folder.

        Raises:
            OSError: the folder cannot be opened, or the system has no /proc.
        """
        path = str(self.socket_path)
        if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
            yield path
            return
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not os.path.isdir(f"/proc/self/fd/{folder}"):
                text = f"the path of a socket is longer than {_MAX_ADDRESS_BYTES} bytes; set TMPDIR to a shorter folder"
                raise OSError(errno.ENAMETOOLONG, text, path)
            yield f"/proc/self/fd/{folder}/{self.socket_path.name}"
        finally:
            os.close(folder)

    def listen(self) -> socket.socket:
        """Return a listening socket at `socket_path`, in place of the socket of a killed service."""
        self.socket_path.unlink(missing_ok=True)
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
        """Return a connection to the listening process, or None if no process listens.

        The process may be about to end and never reply.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self._short_address() as path:
                sock.connect(path)
            return sock
        except OSError:
            sock.close()
            return None

    def find_service_pid(self) -> int | None:
        """Return the process id of the service, or None if no process listens."""
        sock = self.open_socket()
        if sock is None:
            return None
        with sock:
            return read_peer_credentials(sock)[0]

    def open_conversation(self, outgoing: Schema, incoming: Schema, seconds: float) -> Conversation | None:
        """Return a conversation with the service, or None if no service replies within `seconds`.

        Args:
            outgoing: messages that this process sends.
            incoming: messages that this process accepts.

        Raises:
            ProtocolError: the process belongs to another user or speaks another version of the protocol.
        """
        sock = self.open_socket()
        if sock is None:
            return None
        greeting = Conversation(sock, GREETINGS, GREETINGS)
        try:
            check_peer(sock)
            with greeting.time_limit(seconds):
                # The kernel may still accept connections for a service that is ending or was killed, so wait for a
                # reply.
                if isinstance(greeting.request(ConnectRequest(self.name)), ConnectReply):
                    return Conversation(sock, outgoing, incoming)
            raise ProtocolError(f"the process that listens on {str(self.socket_path)!r} is not a {self.name} service")
        except ProtocolError:
            sock.close()
            raise
        except OSError:
            sock.close()
            return None

    def remove_leftovers(self) -> None:
        """Remove the files of killed services of this name in the neighbouring folders."""
        for lock_path in self.folder.parent.glob(f"*/{self.lock_path.name}"):
            location = ServiceLocation(lock_path.parent, self.name)
            with contextlib.suppress(OSError):
                lock = location.acquire_lock(make=False)
                if lock is not None:
                    location.release(lock)
