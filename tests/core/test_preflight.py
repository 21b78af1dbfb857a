"""Layouts that do not fit this machine: refused before the start, with figure, key and remedy."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.config import Config, load
from megascale.core import capacity as machine
from megascale.core.capacity import Capacity, free_disk
from megascale.core.host_memory import checkpoint_bytes, estimate_snapshot_bytes
from megascale.core.layout import Layout, lay_out
from megascale.core.preflight import (
    FORKED_TRAINER_BYTES,
    GPU_TRAINER_BYTES,
    HostShare,
    check_host,
    check_host_memory,
    check_processes,
    count_local_stage_ranks,
)
from megascale.core.rank_memory import estimate_rank_memory
from megascale.errors import FitError

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 2**20
GIB = 2**30
SMALL = Capacity(memory=23 * GIB, memory_from="MemAvailable", cores=2, open_files=1024, processes=30_000)
ROOM = 100 * GIB


def run(
    arguments: list[str], share: HostShare, capacity: Capacity = SMALL, disk: int = ROOM, file: str = ""
) -> list[str]:
    """Lines said; FitError if refused."""
    output: list[str] = []
    config = load(EXAMPLES / file if file else None, ["--model.vocab_size=50304"] + arguments)
    check_host(lay_out(config, share.world), share, capacity, lambda folder: disk, output.append)
    return output


def refused(*arguments: str, share: HostShare, **more) -> str:
    with pytest.raises(FitError) as caught:
        run(list(arguments), share, **more)
    assert caught.value.exit_code == 3
    assert "--train.fit=force" in str(caught.value)
    forced = run(list(arguments) + ["--train.fit=force"], share, **more)
    assert any("train.fit=force: starting although" in line for line in forced)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "arguments", "ranks"),
    [("stdlib.toml", [], 1), ("stdlib-3d.toml", [], 8), ("", ["--model.preset=gpt2-124m", "--train.micro_batch=2"], 1)],
)
def test_what_runs_on_a_small_machine_is_not_refused(file, arguments, ranks):
    two = replace(SMALL, memory=8 * GIB)
    assert run(list(arguments) + ["--train.global_batch=16"], HostShare(ranks, 0, ranks), two, 4 * GIB, file) == []


def test_13b_on_a_host_without_gpus():
    text = refused(share=HostShare(4, 0, 4), file="gpt-13b-3d.toml")
    for part in ("model.layers=40", "MemAvailable leaves 23.0 GiB", "optimizer", "--train.micro_batch=1", "4 ranks"):
        assert part in text


def test_one_process_that_is_there_already_counts_its_tensors_alone():
    arguments = ["--model.preset=gpt-1.3b", "--train.precision=bfloat16", "--train.global_batch=64"]
    text = refused(*arguments, share=HostShare(1, 0, 1, is_running=True, writes_checkpoints=False))
    assert "processes of" not in text
    assert "tensors of 1 rank (" in text
    run(arguments, HostShare(1, 0, 1, is_running=True, writes_checkpoints=False), replace(SMALL, memory=50 * GIB))


def test_graphs_are_named_where_their_memory_may_be_what_lacks():
    arguments = (
        "--model.preset=gpt-13b",
        "--train.micro_batch=1",
        "--train.global_batch=2",
        "--train.precision=bfloat16",
    )
    gpu, share = replace(SMALL, memory=200 * GIB, gpu_memory=60 * GIB), HostShare(2, 0, 2, uses_gpus=True)
    text = refused(*arguments, "--kernels.graphs=on", share=share, capacity=gpu)
    assert "--kernels.graphs=auto and --parallel.recompute=full need less" in text
    assert "graphs" not in refused(*arguments, share=share, capacity=gpu)


def test_gpu_memory_is_that_of_the_fullest_stage():
    share = HostShare(8, 0, 8, uses_gpus=True)
    gpu = replace(SMALL, memory=64 * GIB, gpu_memory=48 * GIB)
    text = refused(share=share, capacity=gpu, disk=10**15, file="gpt-13b-3d.toml")
    assert "of GPU memory" in text
    assert "the GPU has 48.0 GiB" in text
    assert run([], share, replace(gpu, gpu_memory=141 * GIB), 10**15, "gpt-13b-3d.toml") == []
    assert run([], share, replace(gpu, gpu_memory=None), 10**15, "gpt-13b-3d.toml") == []


def test_3000_nodes_on_two_cores():
    share = HostShare(3000, 0, 3000, nodes=3000)
    arguments = ["--train.micro_batch=1", "--train.global_batch=3000", "--train.threads=1"]
    text = refused(*arguments, share=share, capacity=replace(SMALL, open_files=20_000, processes=90_000))
    for part in ("3000 ranks on 3000 nodes", "GiB for their processes alone", "23.0 GiB", "lower --nodes"):
        assert part in text
    text = refused(*arguments, share=share, capacity=replace(SMALL, memory=10_000 * GIB))
    assert "open files" in text
    assert "1,024" in text
    assert "ulimit -n 6064" in text
    assert "processes and threads" in text
    assert "30,000" in text


def test_a_crowd_that_fits_is_told_to_be_slow():
    output = run(["--train.micro_batch=1", "--train.global_batch=40"], HostShare(40, 0, 40, nodes=40))
    assert output == ["40 ranks share 2 cores: starting will take long and steps will be slow"]


def test_disk_for_a_checkpoint_and_memory_for_its_copies(tmp_path):
    arguments = ["--model.layers=8", "--model.hidden=512"]
    single = HostShare(1, 0, 1)
    config = load(None, ["--model.vocab_size=50304"] + arguments)
    needed = checkpoint_bytes(config)
    run(arguments, single, disk=needed)
    text = refused(*arguments, share=single, disk=needed - 1)
    assert "checkpoint.location" in text
    assert "MiB of free disk" in text
    small = ["--model.vocab_size=300", "--model.layers=1", "--model.hidden=8", "--model.heads=1"]
    text = refused(*small, share=single, disk=1)
    assert re.search(r"takes [0-9.]+ KiB and .* has 0.0 KiB of free disk", text)
    for none in (["--checkpoint.at_end=false", "--checkpoint.interval=0"], ["--checkpoint.location=s3://bucket/run"]):
        run(arguments + none, single, disk=0)
    run(arguments, replace(single, writes_checkpoints=False), disk=0)
    copies = ["--checkpoint.background=true", "--checkpoint.slots=4"]
    tight = replace(SMALL, memory=2 * GIB)
    run(arguments + ["--train.micro_batch=1"], single, tight)
    assert "checkpoint.slots" in refused(*arguments, "--train.micro_batch=1", *copies, share=single, capacity=tight)
    # Half of the state on each of two hosts, and as much again of the other host's.
    copies = ["--checkpoint.background=true", "--checkpoint.slots=2", "--parallel.data=2", "--train.micro_batch=1"]
    half, roomy = HostShare(2, 0, 1, uses_gpus=True), replace(SMALL, memory=int(GPU_TRAINER_BYTES + 1.5 * needed))
    run(arguments + copies, half, roomy)
    assert "checkpoint.slots" in refused(*arguments, *copies, "--checkpoint.replicas=true", share=half, capacity=roomy)
    assert free_disk(tmp_path / "not" / "yet" / "made") > 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 63), st.integers(1, 64))
def test_stages_of_a_host_are_those_of_its_ranks(tensor, pipeline, data, first, ranks):
    world = tensor * pipeline * data
    first = min(first, world - 1)
    ranks = min(ranks, world - first)
    arguments = [f"--parallel.tensor={tensor}", f"--parallel.pipeline={pipeline}", f"--train.global_batch={data * 8}"]
    shape = ["--model.heads=12", "--model.hidden=48", "--model.sequence_length=12", "--model.vocab_size=10"]
    layout = lay_out(load(None, arguments + shape + ["--model.vocab_multiple=12"]), world)
    counted: dict[int, int] = {}
    for rank in range(first, first + ranks):
        stage = layout.grid.coordinate(rank).pipeline
        counted[stage] = counted.get(stage, 0) + 1
    assert count_local_stage_ranks(layout, HostShare(world, first, ranks)) == counted


# the machine --------------------------------------------------------------------------------------------------------


def kernel(folder: Path, cgroup: str = "0::/job\n") -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a machine with 8 GiB left."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "sys" / "kernel").mkdir(parents=True)
    (groups / "job").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "sys" / "kernel" / "pid_max").write_text("32768\n")
    (proc / "sys" / "kernel" / "threads-max").write_text("99999\n")
    (proc / "loadavg").write_text("0.1 0.2 0.3 1/768 4242\n")
    return proc, groups


def test_memory_and_processes_that_the_kernel_tells_of(tmp_path):
    proc, groups = kernel(tmp_path)
    result = Capacity.measure(proc, groups)
    assert (result.memory, result.memory_from) == (8 * GIB, "MemAvailable")
    assert result.processes is not None
    assert result.processes <= 32_000


def test_the_tightest_control_group_counts_without_its_cache(tmp_path):
    proc, groups = kernel(tmp_path)
    (groups / "job" / "memory.max").write_text("max\n")
    (groups / "job" / "pids.max").write_text("100\n")
    (groups / "job" / "pids.current").write_text("40\n")
    (groups / "memory.max").write_text(f"{4 * GIB}\n")
    (groups / "memory.current").write_text(f"{3 * GIB}\n")
    (groups / "memory.stat").write_text(f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n")
    result = Capacity.measure(proc, groups)
    assert (result.memory, result.memory_from) == (3 * GIB, "the control group's memory.max")
    assert (result.processes, result.processes_from) == (60, "the control group's pids.max")


def test_control_groups_of_version_1(tmp_path):
    proc, groups = kernel(tmp_path, "5:memory:/host/name\n3:cpu,cpuacct:/\n0::/\n")
    memory = groups / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (memory / "memory.usage_in_bytes").write_text("5")
    assert Capacity.measure(proc, groups).memory == 8 * GIB
    (memory / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (memory / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    (memory / "memory.usage_in_bytes").write_text(str(GIB))
    assert Capacity.measure(proc, groups).memory == 2 * GIB


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path):
    result = Capacity.measure(tmp_path, tmp_path)
    assert (result.memory, result.gpu_memory) == (None, None)
    unknown = replace(result, open_files=None, processes=None)
    run(["--train.global_batch=4096", "--train.micro_batch=1"], HostShare(4096, 0, 4096, nodes=4096), unknown)


def test_open_files_are_those_of_this_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, soft // 2), hard))
    try:
        assert Capacity.measure().open_files == max(256, soft // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("visible", "gib"), [(None, 40), ("1", 80), ("0,1", 40), ("GPU-b", 80), ("MIG-1", None), ("7", None)]
)
def test_the_smallest_gpu_that_is_visible(tmp_path, monkeypatch, visible, gib):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, 40960'\necho '1, GPU-b, 81920'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._smallest_gpu_memory() == (None if gib is None else gib * GIB)


def test_forked_trainers_share_what_their_server_imported():
    config: Config = load(None, ["--model.vocab_size=64", "--train.global_batch=8", "--train.micro_batch=1"])
    assert config.train.fit == "check"
    nodes = HostShare(8, 0, 8, nodes=8)
    assert FORKED_TRAINER_BYTES * 8 < 8 * GIB
    check_host(lay_out(config, nodes.world), nodes, replace(SMALL, memory=4 * GIB), lambda folder: ROOM)


def test_a_second_set_of_communicators_takes_memory_of_the_gpu():
    copies = ["--checkpoint.background=true", "--checkpoint.replicas=true", "--checkpoint.memory_interval=1"]
    arguments = ["--model.preset=gpt2-124m", "--train.micro_batch=1", "--resilience.continue_replicas=true", *copies]
    prepared = "--rendezvous.prepared_groups=true"
    share = HostShare(8, 0, 8, nodes=8, uses_gpus=True)
    gpu = replace(SMALL, memory=640 * GIB, gpu_memory=80 * GIB)
    text = refused(*arguments, share=share, capacity=replace(gpu, gpu_memory=GIB))
    needed = float(text.partition("the fullest rank needs ")[2].partition(" GiB")[0])
    tight_gpu = replace(gpu, gpu_memory=int((needed + 0.5) * GIB))
    assert run(arguments, share, tight_gpu) == []
    text = refused(*arguments, prepared, share=share, capacity=tight_gpu)
    assert "of GPU memory" in text
    assert "--rendezvous.prepared_groups=false" in text
    # The default group's four channels and pairs, and 12 channels each for gathers and for reductions.
    connection = 4 * MIB + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
    layout = lay_out(load(None, [*arguments, prepared, "--parallel.data=8"]), 8)
    memory, _ = layout.stage_memory(0)
    assert memory.prepared_groups == (4 + 2 * 12) * 3 * connection + 7 * 4 * 4 * MIB
    assert estimate_rank_memory(layout.config, layout.grid, layout.schedule(), 0, has_gpu=False)[0].prepared_groups == 0


def test_standby_processes_take_memory_of_host_and_gpu():
    """Their contexts take 1 GiB of each GPU, and each process of a rank has a second one."""
    arguments = ["--model.preset=gpt2-124m", "--train.micro_batch=1", "--checkpoint.background=false"]
    standby = "--resilience.standby_processes=true"
    share = HostShare(8, 0, 8, nodes=1, uses_gpus=True)
    gpu = replace(SMALL, memory=64 * GIB, gpu_memory=80 * GIB)
    assert run([*arguments, standby], share, gpu) == []
    tight_host = replace(gpu, memory=6 * GIB)
    assert run(arguments, share, tight_host) == []
    remedy = "--resilience.standby_processes=false"
    text = refused(*arguments, standby, share=share, capacity=tight_host)
    assert "this host has too little memory" in text
    assert remedy in text
    tight_limit = replace(gpu, processes=150)  # the ranks alone have 96 threads
    assert run([*arguments, "--train.threads=4"], share, tight_limit) == []
    text = refused(*arguments, "--train.threads=4", standby, share=share, capacity=tight_limit)
    assert "processes and threads" in text
    assert remedy in text
    text = refused(*arguments, share=share, capacity=replace(gpu, gpu_memory=GIB))
    needed = float(text.partition("the fullest rank needs ")[2].partition(" GiB")[0])
    tight_gpu = replace(gpu, gpu_memory=int((needed + 0.5) * GIB))
    assert run(arguments, share, tight_gpu) == []
    text = refused(*arguments, standby, share=share, capacity=tight_gpu)
    assert "of GPU memory" in text
    assert remedy in text


def test_other_commands_that_start_processes_by_the_number():
    check_processes("--workers", 100, 30 << 20, SMALL)
    with pytest.raises(FitError, match=r"--workers=1000 processes need 29.3 GiB at least .* ask for 785 or fewer"):
        check_processes("--workers", 1000, 30 << 20, SMALL)
    with pytest.raises(FitError, match=r"--workers=40000 processes are more than the 30,000"):
        check_processes("--workers", 40_000, 1, SMALL)


# copies of the state -------------------------------------------------------------------------------------------------

COPIES = [
    "--model.preset=gpt-13b",
    "--train.precision=bfloat16",
    "--train.micro_batch=1",
    "--checkpoint.background=true",
    "--checkpoint.memory_interval=1",
]


def make_layout(world: int, *arguments: str) -> Layout:
    return lay_out(load(None, ["--model.vocab_size=50304", *COPIES, *arguments]), world)


def test_copies_that_do_not_fit_a_node_are_refused_with_keys_bytes_and_remedy():
    """A node of another machine has two of four ranks, its own snapshots and those of a peer, two of each."""
    layout = make_layout(4, "--checkpoint.replicas=true", "--parallel.data=4")
    share = HostShare(4, 0, 2, uses_gpus=True, is_running=True)
    needed = 4 * (checkpoint_bytes(layout.config) // 4) * 2
    check_host_memory(layout, share, replace(SMALL, memory=needed))
    with pytest.raises(FitError) as caught:
        check_host_memory(layout, share, replace(SMALL, memory=needed - 1))
    text = str(caught.value)
    for part in (
        f"{needed / 2 / GIB:,.1f} GiB for snapshots (checkpoint.background=true, checkpoint.slots=2)",
        f"{needed / 2 / GIB:,.1f} GiB for copies of other hosts' snapshots (checkpoint.replicas=true, 2 per rank)",
        f"{needed / GIB:,.1f} GiB in total",
        "set checkpoint.slots=1 or checkpoint.replicas=false, fewer ranks per host",
        "--train.fit=force",
    ):
        assert part in text
    # With one slot and no copies of peers, only the copies in memory themselves can be switched off.
    single = make_layout(4, "--checkpoint.slots=1", "--parallel.data=4")
    with pytest.raises(FitError, match=r"set checkpoint\.memory_interval=0 and checkpoint\.background=false, fewer"):
        check_host_memory(single, share, replace(SMALL, memory=1))
    # The memory of an earlier start's service is used again.
    check_host_memory(layout, replace(share, reused_bytes=1 << 20), replace(SMALL, memory=needed - 1))
    output: list[str] = []
    forced = lay_out(load(None, ["--model.vocab_size=50304", *COPIES, "--train.fit=force"]), 4)
    check_host_memory(forced, share, replace(SMALL, memory=1), report=output.append)
    assert output[0].startswith("train.fit=force: starting although this host has too little memory")


def test_memory_that_lacks_only_after_a_loss_is_a_warning():
    layout = make_layout(4, "--checkpoint.replicas=true", "--parallel.data=4", "--resilience.continue_replicas=true")
    share = HostShare(4, 0, 2, uses_gpus=True, is_running=True)
    needed = 4 * (checkpoint_bytes(layout.config) // 4) * 2
    output: list[str] = []
    check_host_memory(layout, share, replace(SMALL, memory=2 * needed), snapshot_growth=2.0, report=output.append)
    assert output == []
    check_host_memory(layout, share, replace(SMALL, memory=2 * needed - 1), snapshot_growth=2.0, report=output.append)
    assert len(output) == 1
    remedy = "set checkpoint.slots=1 or resilience.continue_replicas=false"  # at least one replica may be missing
    for part in ("resilience.max_missing_replicas=1", f"{2 * needed / GIB:,.1f} GiB", remedy):
        assert part in output[0]
    # continue_replicas needs the copies of other hosts' snapshots.
    remedy = r"set checkpoint\.slots=1 or resilience\.continue_replicas=false and checkpoint\.replicas=false, fewer"
    with pytest.raises(FitError, match=remedy):
        check_host_memory(layout, share, replace(SMALL, memory=1))


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["adamw", "lamb", "muon"]))
def test_snapshots_of_all_ranks_are_the_checkpoint(pipeline, data, optimizer):
    """Stages differ by embedding and output, so a host of the middle stages needs less than the mean."""
    layout = make_layout(
        pipeline * data,
        f"--parallel.pipeline={pipeline}",
        f"--parallel.data={data}",
        f"--optimizer.name={optimizer}",
        "--train.global_batch=48",
        "--model.layers=12",
        "--model.hidden=640",
    )
    sizes = [estimate_snapshot_bytes(layout, stage) for stage in range(pipeline)]
    total = checkpoint_bytes(layout.config)
    assert total - pipeline * data <= data * sum(sizes) <= total
    if pipeline > 2:
        assert sizes[1] < total // (pipeline * data)


def test_offloaded_optimizer_state_takes_memory_of_the_host():
    layout = make_layout(
        2, "--optimizer.offload=true", "--checkpoint.memory_interval=0", "--checkpoint.background=false"
    )
    share = HostShare(2, 0, 2, uses_gpus=True, is_running=True)
    needed = checkpoint_bytes(layout.config)
    check_host_memory(layout, share, replace(SMALL, memory=needed + MIB))
    with pytest.raises(FitError, match=r"optimizer.offload=true\), .* set optimizer.offload=false"):
        check_host_memory(layout, share, replace(SMALL, memory=needed - MIB))


def test_the_limit_of_memory_is_that_of_the_machine_or_of_a_control_group(tmp_path):
    proc, groups = kernel(tmp_path)
    assert machine.measure_memory_limit(proc, groups) == (16 * GIB, "MemTotal")
    (groups / "job" / "memory.max").write_text(f"{4 * GIB}\n")
    assert machine.measure_memory_limit(proc, groups) == (4 * GIB, "the control group's memory.max")
    assert machine.measure_memory_limit(tmp_path / "none", tmp_path / "none") == (None, "")
