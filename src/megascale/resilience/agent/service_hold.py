"""Hold of a node's checkpoint service while the job has no trainers there.

The service ends `checkpoint.linger` seconds after its last trainer, and with it the copies of the state in memory.
Self-checks, and starts on a busy machine, may take longer. A connection of the agent keeps the service alive meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from megascale.checkpoint.background.service_protocol import FROM_SERVICE, TO_SERVICE, locate_service, private_folder
from megascale.services.conversation import Conversation
from megascale.services.host_service import find_service

log = logging.getLogger("megascale.agent")
_CONNECT_SECONDS = 2.0  # to wait for a service that is starting


class ServiceHold:
    """Connection to the checkpoint service of a node.

    Args:
        run: run folder of the trainers.
        node: name of the node.
        seconds: time after which the hold ends, unless it is renewed.
    """

    def __init__(self, run: Path, node: str, seconds: float) -> None:
        self._run = run
        self._node = node
        self._seconds = seconds
        self._conversation: Conversation | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._release_count = 0  # a release while a thread connects must win

    async def renew(self) -> None:
        """Hold the service for another `seconds`, if it runs."""
        async with self._lock:
            if self._conversation is None or not self._conversation.is_connected():
                self.release()
                release_count = self._release_count
                conversation = await asyncio.to_thread(self._connect)
                if self._release_count != release_count:
                    if conversation is not None:
                        conversation.close()
                    return
                self._conversation = conversation
            self._cancel_timer()
            if self._conversation is not None:
                self._timer = asyncio.get_running_loop().call_later(self._seconds, self.release)

    def release(self) -> None:
        """Let the service end as if its last trainer had just left. A `renew` under way holds nothing."""
        self._release_count += 1
        self._cancel_timer()
        if self._conversation is not None:
            self._conversation.close()
            self._conversation = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _connect(self) -> Conversation | None:
        """Connect to the service. Return None if it does not run or does not reply."""
        try:
            location = locate_service(private_folder(self._run, self._node))
            conversation = find_service(location, TO_SERVICE, FROM_SERVICE, seconds=_CONNECT_SECONDS)
        except OSError as error:
            log.warning("the checkpoint service is not kept alive for the next attempt: %s", error)
            return None
        if conversation is None:
            with contextlib.suppress(OSError):  # files of a service that is just starting are in the folder
                location.folder.rmdir()
        return conversation
