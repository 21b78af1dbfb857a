"""Files of environment variables: read as a shell reads them, or refused."""

from __future__ import annotations

import subprocess

import pytest

from megascale.core.launch_files import read_environment
from megascale.errors import ConfigError, DataError
from megascale.simulate.fabric.flaps import format_environment, list_lognormal_quantiles, score_setting


def test_what_tune_writes_means_the_same_in_a_shell(tmp_path):
    file = tmp_path / "network.env"
    best = score_setting(list_lognormal_quantiles(3.0, 1.0), 21, 7, True, 600.0, 0.02)
    file.write_text(format_environment(best, "about") + "NCCL_IB_HCA=^mlx5_3:1\n")
    result = read_environment(file, "resilience.environment")
    assert result == {"NCCL_IB_TIMEOUT": "21", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_HCA": "^mlx5_3:1"}
    report = subprocess.run(
        ["sh", "-c", f"set -a; . {file}; env"], capture_output=True, text=True, check=True, env={}
    ).stdout.splitlines()
    assert {f"{name}={value}" for name, value in result.items()} <= set(report)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("export NCCL_DEBUG=INFO", "line 1: 'export NCCL_DEBUG=INFO' is not NAME=VALUE"),
        ("# so\nNCCL_DEBUG = INFO", "line 2"),
        ("NCCL_DEBUG='INFO'", "quotes"),
        ("NCCL_DEBUG=$HOME", "not NAME=VALUE"),
        ("NCCL_A=1\nNCCL_A=2", "NCCL_A is set twice"),
        ("NCCL_IB_TC=1\nLD_PRELOAD=/tmp/x.so", "line 2: LD_PRELOAD is not taken from resilience.environment"),
        ("\n".join(f"NCCL_A{i}=1" for i in range(257)), "at most 256"),
        ("A=" + "x" * 70000, "70,0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, report):
    file = tmp_path / "x.env"
    file.write_text(text)
    with pytest.raises(DataError, match=report.replace("$", r"\$")):
        read_environment(file, "resilience.environment")


def test_no_file_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"resilience\.environment=.*No such file"):
        read_environment(tmp_path / "none", "resilience.environment")


@pytest.mark.parametrize(
    "name",
    [
        "OPENSSL_CONF", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN",
        "NCCL_CONF_FILE", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "UCX_MODULE_DIR",
        "UCX_MODULES", "UCX_GDB_COMMAND", "UCX_ERROR_MAIL_TO", "UCX_STATS_DEST", "FI_PROVIDER_PATH", "RDMAV_DRIVERS",
        "OMP_TOOL", "OMP_TOOL_LIBRARIES", "CC", "CXX", "CUDA_HOME", "HOME", "PATH", "BASH_ENV", "ENV", "LD_PRELOAD",
        "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "XDG_CACHE_HOME",
        "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "GCONV_PATH", "GIT_SSH", "AWS_CONFIG_FILE",
        "WANDB__EXECUTABLE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MEGASCALE_NODE", "CUDA_VISIBLE_DEVICES",
        "nccl_debug", "XNCCL_DEBUG",
    ],
)  # fmt: skip
def test_what_may_run_code_or_is_the_jobs_own_is_refused(tmp_path, name):
    file = tmp_path / "x.env"
    file.write_text(f"{name}=1\n")
    with pytest.raises(DataError, match=f"{name} is not taken"):
        read_environment(file, "resilience.environment")


def test_figures_addresses_and_keys_are_taken(tmp_path):
    names = [
        "NCCL_DEBUG", "NCCL_IB_TIMEOUT", "NCCL_TOPO_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "GLOO_SOCKET_IFNAME",
        "UCX_NET_DEVICES", "UCX_IB_NUM_PATHS", "UCX_PROFILE_MODE", "FI_PROVIDER", "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY",
    ]  # fmt: skip
    file = tmp_path / "x.env"
    file.write_text("".join(f"{name}=1\n" for name in names))
    assert list(read_environment(file, "resilience.environment")) == names
