"""Compiled kernels: installations of equal kernels share them, and a folder of the user's choice keeps them apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megascale.simulate.fabric.jit import cache_folder

pytest.importorskip("numba")
pytestmark = pytest.mark.xdist_group("packet_kernel")

KERNEL = """
from megascale.simulate.fabric.jit import compiled

@compiled
def add(a, b):
    return a + b
"""


def load_kernel(folder: Path, text: str = KERNEL) -> Any:
    """Return the kernel of a module in a folder, as another installation has it."""
    folder.mkdir()
    file = folder / "small_kernel.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("small_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.add


def count_hits(kernel: Any) -> int:
    """Run a kernel, and return how often numba has loaded its code instead of compiling it."""
    assert kernel(2, 3) == 5
    return sum(kernel.stats.cache_hits.values())


def test_a_second_installation_loads_what_the_first_has_compiled(monkeypatch, tmp_path) -> None:
    import numba

    settings: Any = numba.config
    if not hasattr(settings, "CACHE_LOCATOR_CLASSES"):
        pytest.skip("this release of numba keeps installations apart")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = settings.CACHE_LOCATOR_CLASSES
    assert count_hits(load_kernel(tmp_path / "first")) == 0
    assert list(cache_folder().glob("small_kernel.add-*.nbi"))
    assert count_hits(load_kernel(tmp_path / "second")) == 1
    assert count_hits(load_kernel(tmp_path / "third", KERNEL.replace("a + b", "b + a"))) == 0
    locators = settings.CACHE_LOCATOR_CLASSES
    assert locators == before


def test_other_kernels_have_another_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = cache_folder()
    monkeypatch.setattr("megascale.simulate.fabric.jit.KERNELS", ("dcqcn.py",))
    assert cache_folder() != before


@pytest.mark.parametrize("is_configured", [True, False])
def test_numba_locates_the_code_in_a_configured_folder_and_without_a_writable_one(
    is_configured: bool, monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made below it
    if is_configured:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "configured"))
        monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "configured"))
    else:
        monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
        monkeypatch.setattr("numba.config.CACHE_DIR", "")
    kernel = load_kernel(tmp_path / "first")
    assert count_hits(kernel) == 0
    folder = tmp_path / ("configured" if is_configured else "first")
    assert list(folder.glob("*/small_kernel.add-*.nbi"))
