"""The shared token: who knows it can prove it, for one connection and one purpose; its file is this user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.errors import DataError, TrainingError
from megascale.services.service_location import make_private_folder
from megascale.services.shared_token import PROOF_BYTES, TokenProof, make_token, read_token

TOKENS = st.binary(min_size=1, max_size=80)


@given(first=TOKENS, two=TOKENS, purposes=st.tuples(st.sampled_from("ab"), st.sampled_from("ab")))
def test_both_sides_must_know_the_token_and_mean_the_same(first: bytes, two: bytes, purposes: tuple[str, str]) -> None:
    server, client = TokenProof(first, purposes[0], "server"), TokenProof(two, purposes[1], "client")
    to_client, to_server = server.answer_nonce(client.nonce), client.answer_nonce(server.nonce)
    assert len(to_client) == len(to_server) == PROOF_BYTES
    alike = first == two and purposes[0] == purposes[1]
    # HMAC fills a short key up with zero bytes.
    if first != two and first.ljust(64, b"\0") == two.ljust(64, b"\0"):
        return
    assert (
        server.is_valid_answer(to_server)
        == client.is_valid_answer(to_client)
        == (server.connection_key() == client.connection_key())
        == alike
    )


def test_an_answer_is_of_no_use_elsewhere() -> None:
    server = TokenProof(b"token", "agents", "server")
    reflected = server.answer_nonce(server.nonce)  # somebody who does not know the token sends back all that it is sent
    assert not server.is_valid_answer(reflected)
    client, second_client = TokenProof(b"token", "agents", "client"), TokenProof(b"token", "agents", "client")
    server.answer_nonce(second_client.nonce)
    assert not server.is_valid_answer(client.answer_nonce(server.nonce))  # made on another connection
    assert server.is_valid_answer(second_client.answer_nonce(server.nonce))
    with pytest.raises(ValueError, match="empty"):
        TokenProof(b"", "agents", "server")


def test_a_token_is_made_once_and_its_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "driver" / "token"
    with pytest.raises(DataError, match="cannot be read"):
        read_token(path)
    token = make_token(path)
    assert token == make_token(path) == read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(DataError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 4321, -1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1234)
        with pytest.raises(DataError, match="another user"):
            read_token(path)
    path.write_text("short\n")
    with pytest.raises(DataError, match="too short"):
        read_token(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(DataError, match="cannot be read"):
        read_token(path)


def test_a_private_folder_is_this_users_alone(tmp_path: Path) -> None:
    location = tmp_path / "own"
    assert make_private_folder(location) == make_private_folder(location) == location
    assert location.stat().st_mode & 0o777 == 0o700
    location.chmod(0o755)
    make_private_folder(location)
    assert location.stat().st_mode & 0o777 == 0o700
    location.chmod(0o777)
    with pytest.raises(TrainingError, match="by others"):
        make_private_folder(location)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for wrong in ("link", "file"):
        with pytest.raises(TrainingError, match="not a folder"):
            make_private_folder(tmp_path / wrong)
