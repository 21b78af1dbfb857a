"""What is said when a driver cannot start."""

from __future__ import annotations

import errno
import socket

import pytest

from megascale.resilience.driver.start_driver import _cannot_listen


def test_an_address_that_does_not_resolve_and_a_port_that_is_taken_are_told_in_words() -> None:
    with pytest.raises(OSError) as found:
        socket.getaddrinfo("no such host", 0, flags=socket.AI_NUMERICHOST)
    said = str(_cannot_listen("port", "no such host", 0, found.value))
    assert "resilience.listen=no such host" in said
    assert "Unknown error" not in said
    assert "known" in said.lower() or "resol" in said.lower()
    assert "already in use" in str(_cannot_listen("port", "127.0.0.1", 80, OSError(errno.EADDRINUSE, "long words")))
