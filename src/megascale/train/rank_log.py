"""What a rank writes into its log besides its output: lines with date, attempt and rank, so that logs can be joined."""

from __future__ import annotations

import logging
import os
import socket
import time

from megascale.train.rank_info import RankInfo

log = logging.getLogger("megascale.train")

VARIABLE = "MEGASCALE_ATTEMPT"  # set where an agent started this rank, whose output is a log then


class _Utc(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]


def begin(place: RankInfo, attempt: int) -> None:
    """From now on warnings, and what megascale notes, go to this rank's log; its first line says who writes.

    Rank 0 of `megascale train` has a terminal and no log; a program that has set up logging is left alone.
    """
    root = logging.getLogger()
    if root.handlers or (place.rank == 0 and VARIABLE not in os.environ):
        return
    handler = logging.StreamHandler()
    line = f"%(asctime)s.%(msecs)03dZ attempt {attempt} rank {place.rank} %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_Utc(line, "%Y-%m-%dT%H:%M:%S"))
    root.addHandler(handler)
    log.setLevel(logging.INFO)
    log.info("process %d on %s, one of %d, begins", os.getpid(), socket.gethostname(), place.world)
