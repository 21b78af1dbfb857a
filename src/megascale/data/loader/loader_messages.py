"""What a host's loader and its readers say to each other, besides what lies in the ring. No torch."""

from __future__ import annotations

from megascale.services.conversation import ErrorReply
from megascale.services.messages import Count, Message, Schema

NAME = "loader"
_LIMIT = 1 << 14


class Attach(Message, frozen=True):
    """A reader comes. Beside it: its bell. base: samples consumed before this start; generation: loaders it has had."""

    rank: Count
    base: Count
    generation: Count


class Seated(Message, frozen=True):
    """It has mapped the segment and written how far it is."""

    base: Count


class Bye(Message, frozen=True):
    """It is done with the run."""


class Attached(Message, frozen=True):
    """Beside it: the segment and the loader's bell. generation: number of this loader's process."""

    generation: Count
    pid: Count


FROM_READER = Schema(Attach, Seated, Bye, limit=_LIMIT)
FROM_LOADER = Schema(Attached, ErrorReply, limit=_LIMIT)
