"""One pool of worker processes for the whole run; tests that use it share an xdist group, so that there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exact.pool import Pool
from tests.exact.training import STEPS, RankReport, train


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to eight workers."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_process(pool: Pool) -> Callable[..., RankReport]:
    """Return the results of a configuration in one process after some steps, trained once."""
    expected: dict[str, RankReport] = {}

    def run(tree: dict[str, Any], steps: int = STEPS) -> RankReport:
        key = json.dumps([tree, steps], sort_keys=True)
        if key not in expected:
            [expected[key]] = pool.run(train, 1, tree, steps)
        return expected[key]

    return run
