"""The tokens of the HTTP API: one for looking, one for orders, neither the one that agents prove themselves with.

Each stands in a file of mode 600 beside the others of RUN/driver and nowhere else; whoever is to see a run and not to
steer it gets the text of `token.read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megascale.resilience.protocol.contact import driver_folder
from megascale.services import shared_token

READ, ACT = "token.read", "token.act"


@dataclass(frozen=True)
class ApiTokens:
    """read: for questions; act: for questions and orders."""

    read: bytes
    act: bytes


def make_tokens(run: Path) -> ApiTokens:
    """The run's tokens, made at the first start; DataError as shared_token.read_token."""
    return ApiTokens(*(shared_token.make_token(driver_folder(run) / name) for name in (READ, ACT)))


def read_tokens(run: Path) -> ApiTokens:
    """The run's tokens; DataError as shared_token.read_token."""
    return ApiTokens(*(shared_token.read_token(driver_folder(run) / name) for name in (READ, ACT)))
