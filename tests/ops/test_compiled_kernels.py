"""Compiled kernels of FlashAttention-4 stay on disk, in a folder that no other user can write."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.ops import compiled_kernels
from megascale.ops.compiled_kernels import ENABLED_VARIABLE, FOLDER_VARIABLE, enable_kernel_cache, find_cache_folder

PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megascale.ops.attention_backends import _FlashAttention4, load_flash4

class Context:
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

interface = load_flash4()
compile_kernel = interface.cute.compile
count = 0

def count_and_compile(*args, **options):
    global count
    count += 1
    return compile_kernel(*args, **options)

interface.cute.compile = count_and_compile
with FakeTensorMode(), torch.no_grad():
    q, k, v = torch.empty(256, 1, 6, 128, dtype=torch.bfloat16, device="cuda").split((2, 2, 2), dim=2)
    context = Context()
    out = _FlashAttention4.forward(context, q, k, v, None)
    _FlashAttention4.backward(context, torch.empty_like(out))
print("compiled", count)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a cache of its own, and remove the package's variables afterwards."""
    for variable in (ENABLED_VARIABLE, FOLDER_VARIABLE):
        monkeypatch.setenv(variable, "")  # restored after the test, although the tested function sets it
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_kernels_are_kept_in_a_private_folder_of_the_users_cache(home: Path) -> None:
    enable_kernel_cache()
    folder = Path(os.environ[FOLDER_VARIABLE])
    assert os.environ[ENABLED_VARIABLE] == "1"
    assert folder.parent == home / "megascale"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_gpu_packages_and_compiler_variables_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {find_cache_folder()}
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_100")
    folders.add(find_cache_folder())
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    folders.add(find_cache_folder())
    monkeypatch.setattr(compiled_kernels, "_find_version", lambda package: "1" if "quack" in package else "")
    folders.add(find_cache_folder())
    assert len(folders) == 4


@pytest.mark.parametrize("shared", ["", "megascale"])
def test_a_folder_that_others_can_write_is_not_used(
    home: Path, shared: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_cache_folder()
    folder.mkdir(parents=True)
    (home / shared if shared else folder).chmod(0o777)
    monkeypatch.setattr(logging.getLogger("megascale"), "propagate", True)
    enable_kernel_cache()
    assert ENABLED_VARIABLE not in os.environ
    assert FOLDER_VARIABLE not in os.environ
    assert "another user owns" in caplog.text
    assert FOLDER_VARIABLE in caplog.text


def test_the_environments_own_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED_VARIABLE, "0")
    enable_kernel_cache()
    assert os.environ[ENABLED_VARIABLE] == "0"
    assert FOLDER_VARIABLE not in os.environ


def test_a_second_process_loads_what_the_first_has_compiled(home: Path) -> None:
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed (extra: flash4)")
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    env = {**os.environ, **target, "PYTHONPATH": os.pathsep.join(sys.path)}
    counts = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout.split()[-1]))
    assert counts[0] == len(list(home.rglob("*.o"))) > 0
    assert counts[1] == 0
