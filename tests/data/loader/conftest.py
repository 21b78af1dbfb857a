"""The loaders of these tests are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked_services import forked_services


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forked_services():
        yield
