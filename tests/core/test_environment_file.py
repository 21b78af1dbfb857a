"""Files of environment variables: read as a shell reads them, or refused."""

from __future__ import annotations

import subprocess

import pytest

from megascale.core.environment_file import read_environment
from megascale.errors import ConfigError, DataError
from megascale.simulate.fabric.flaps import environment, judge, lognormal


def test_what_tune_writes_means_the_same_in_a_shell(tmp_path):
    file = tmp_path / "network.env"
    best = judge(lognormal(3.0, 1.0), 21, 7, True, 600.0, 0.02)
    file.write_text(environment(best, "about") + "NCCL_IB_HCA=^mlx5_3:1\n")
    found = read_environment(file, "resilience.environment")
    assert found == {"NCCL_IB_TIMEOUT": "21", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_HCA": "^mlx5_3:1"}
    told = subprocess.run(
        ["sh", "-c", f"set -a; . {file}; env"], capture_output=True, text=True, check=True, env={}
    ).stdout.splitlines()
    assert {f"{name}={value}" for name, value in found.items()} <= set(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("export NCCL_DEBUG=INFO", "line 1: 'export NCCL_DEBUG=INFO' is not NAME=VALUE"),
        ("# so\nNCCL_DEBUG = INFO", "line 2"),
        ("NCCL_DEBUG='INFO'", "quotes"),
        ("NCCL_DEBUG=$HOME", "not NAME=VALUE"),
        ("A=1\nA=2", "A stands there twice"),
        ("LD_PRELOAD=/tmp/x.so", "LD_PRELOAD is the job's own"),
        ("RANK=0", "RANK is the job's own"),
        ("\n".join(f"A{i}=1" for i in range(257)), "at most 256"),
        ("A=" + "x" * 70000, "70,0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, told):
    file = tmp_path / "x.env"
    file.write_text(text)
    with pytest.raises(DataError, match=told.replace("$", r"\$")):
        read_environment(file, "resilience.environment")


def test_no_file_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"resilience\.environment=.*No such file"):
        read_environment(tmp_path / "none", "resilience.environment")
