"""The exactness suite's worker processes serve here too."""

from tests.exact.conftest import one_process, pool  # noqa: F401
