"""The smallest service: it echoes messages, and ends a moment after its last client."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from megascale.services import host_service
from megascale.services.conversation import Conversation, ErrorReply
from megascale.services.host_service import ReadySignal
from megascale.services.messages import Message, Schema, Text
from megascale.services.service_location import ServiceLocation


class Echo(Message, frozen=True):
    text: Text


SCHEMA = Schema(Echo, ErrorReply, limit=4096)


def talk(client: Conversation) -> None:
    """Say back what comes, bytes beside it and open files included."""
    while True:
        message = client.receive(max_body_bytes=1 << 20)
        client.send(message, bytes(client.body), client.files)


def main() -> None:
    """FOLDER LINGER --ready FD, or FOLDER ERROR --ready FD: tell that and end."""
    folder, word, *options = sys.argv[1:]
    handle = int(options[1]) if options else None
    ready = ReadySignal(handle, None) if "--ready" in options else ReadySignal(None, handle)
    if not word.replace(".", "").isdigit():
        ready.send(ErrorReply(word, "DataError"))
        raise SystemExit(1)
    owned = host_service.claim_service(
        ServiceLocation(Path(folder), "echo"), lambda: talk, (SCHEMA, SCHEMA), ready, make_folder=True
    )
    if owned is None:
        return
    owned.server.serve(lambda: owned.server.is_idle(float(word)) and threading.active_count() == 1)
    owned.location.release(owned.lock)


if __name__ == "__main__":
    main()
