"""Exported weights have the permissions of other new files."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from megascale.model.huggingface.weight_files import write_weights


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_the_permissions(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_weights({"a": torch.arange(3.0)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [0.0, 1.0, 2.0]
