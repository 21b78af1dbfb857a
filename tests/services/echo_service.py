"""The smallest service: it says what it is told, and ends a moment after the last one has left."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from megascale.services import host_service
from megascale.services.conversation import Conversation, ErrorReply
from megascale.services.host_service import Ready, ServiceLocation
from megascale.services.messages import Message, Schema, Text


class Echo(Message, frozen=True):
    text: Text


SCHEMA = Schema(Echo, ErrorReply, limit=4096)


def talk(who: Conversation) -> None:
    """Say back what comes, bytes beside it and open files included."""
    while True:
        message = who.receive(attached=1 << 20)
        who.send(message, bytes(who.body), who.files)


def main() -> None:
    """FOLDER LINGER --ready FD, or FOLDER ERROR --ready FD: tell that and end."""
    folder, word, *rest = sys.argv[1:]
    handle = int(rest[1]) if rest else None
    ready = Ready(handle, None) if "--ready" in rest else Ready(None, handle)
    if not word.replace(".", "").isdigit():
        ready.send(ErrorReply(word, "DataError"))
        raise SystemExit(1)
    owned = host_service.claim_service(
        ServiceLocation(Path(folder), "echo"), lambda: talk, (SCHEMA, SCHEMA), ready, make_folder=True
    )
    if owned is None:
        return
    owned.reception.serve(lambda: owned.reception.deserted(float(word)) and threading.active_count() == 1)
    owned.location.release(owned.lock)


if __name__ == "__main__":
    main()
