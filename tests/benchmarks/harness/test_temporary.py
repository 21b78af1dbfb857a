"""The temporary folders of benches outlast services that still write into them."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.harness import temporary
from benchmarks.harness.temporary import temporary_folder


def test_who_writes_into_it_at_its_end_is_waited_for(monkeypatch):
    """As a span service that seals its last segment: it makes a file while the folder is being removed, three times."""
    remove, built = shutil.rmtree, []

    def removed(name):
        if len(built) < 3:
            built.append(os.path.join(name, f"segment-{len(built)}"))
            open(built[-1], "w").close()
            raise OSError(39, "Directory not empty", name)
        remove(name)

    monkeypatch.setattr(shutil, "rmtree", removed)
    with temporary_folder() as name:
        assert os.path.isdir(name)
    assert len(built) == 3
    assert not os.path.exists(name)


def test_one_that_is_gone_already_is_no_error():
    with temporary_folder("megascale-test-") as name:
        assert "megascale-test-" in name
        shutil.rmtree(name)


def test_one_that_cannot_be_removed_is_an_error(monkeypatch):
    monkeypatch.setattr(temporary, "GRACE_SECONDS", 0.0)
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda name: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
    with pytest.raises(OSError, match="not empty"), temporary_folder() as name:
        pass
    remove(name)
