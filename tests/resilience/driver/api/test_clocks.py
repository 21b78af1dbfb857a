"""Machines whose clocks are days apart: commands elsewhere know the driver by its certificate, not by its dates."""

from __future__ import annotations

import datetime
import ssl

import pytest

from megascale.resilience.driver.api import access


class Ahead:
    """The module datetime on a machine whose clock is 30 days ahead."""

    UTC, timedelta = datetime.UTC, datetime.timedelta

    class datetime:
        @staticmethod
        def now(zone):
            return datetime.datetime.now(zone) + datetime.timedelta(days=30)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> bool:
    """Return whether the client accepts the server's proof, all in memory."""
    a, b, c, d = (ssl.MemoryBIO() for _ in range(4))
    near, far = client.wrap_bio(a, b), server.wrap_bio(c, d, server_side=True)
    done = set()
    while len(done) < 2:
        for end, out, into in ((near, b, c), (far, d, a)):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
            into.write(out.read())
    return True


def test_a_certificate_from_a_clock_that_is_ahead_is_known(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    for run in (tmp_path, tmp_path / "other"):
        (run / "driver").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(access, "datetime", Ahead)
        server = access.create_server_context(tmp_path, "0.0.0.0", None, None)
        second = access.create_server_context(tmp_path / "other", "0.0.0.0", None, None)
    assert shake_hands(access.create_client_context(tmp_path), server)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        shake_hands(access.create_client_context(tmp_path), second)
