"""The exactness suite's worker processes serve here too."""

from tests.exact.conftest import pool  # noqa: F401
