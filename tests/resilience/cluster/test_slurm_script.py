"""The batch script: what it asks Slurm for, and what it does with the driver, under a real bash."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import Config, ResilienceConfig, SlurmConfig, TrainConfig, load
from megascale.errors import ConfigError
from megascale.resilience.cluster import slurm
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.remote import Host
from megascale.resilience.cluster.slurm import count_gpus_per_node, expand_counts
from megascale.resilience.cluster.slurm_container import make_container_arguments
from megascale.resilience.cluster.slurm_script import make_batch_script
from tests.conftest import POLL_INTERVAL

# Stands where python does: notes what it was asked for, and ends as the next line of `ends` says.
DRIVER = """#!/bin/bash
echo "$*" >> asked
case "$*" in *--dry-run) echo "the next job"; exit 0;; esac
end=$(sed -n "$(wc -l < asked)p" ends)
[ "$end" = wait ] || { [ "$end" -gt 128 ] && kill -$((end - 128)) $$; exit $end; }
trap 'exit 130' TERM
echo up > up
while :; do sleep 0.05; done
"""


def script(**details) -> str:
    limits = ResilienceConfig(cluster="slurm", nodes=2, spares=1, sbatch="--partition=gpu --signal=B:USR1@60")
    settings = details.pop("slurm", SlurmConfig())
    arguments = {"gpus": 8, "overrides": ["job file.toml", "--nodes=2"], "blocked": ["n7", "n9"], "path": ""} | details
    return make_batch_script(Config(resilience=limits, slurm=settings), **arguments)


def test_it_asks_for_one_allocation_with_spares_and_without_evicted_nodes():
    options = [line.removeprefix("#SBATCH ") for line in script().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--gpus-per-node=8", "--no-kill", "--requeue", "--exclude=n7,n9"} <= set(options)
    assert options.index("--signal=B:USR1@60") > options.index("--signal=B:USR1@300")  # sbatch takes the last
    assert not [line for line in script(gpus=0, blocked=[]).splitlines() if "gpus" in line or "exclude" in line]


@pytest.mark.parametrize(
    ("sbatch", "time", "message"),
    [
        ("--array=0-3", "", "has --array, which the batch script sets; remove it, and use slurm.attempts"),
        ("-a 0-3", "", "has --array"),
        ("--nodes=1", "", "has --nodes, .* use resilience.nodes and resilience.spares"),
        ("-N1", "", "has --nodes"),
        ("partition=gpu", "", "begins with 'partition=gpu', which is not an option; write --partition=gpu"),
        ("--signal=TERM@30", "", "has --signal=TERM@30, and the batch script saves on USR1"),
        ("--signal=USR1@30", "", "write --signal=B:USR1@300"),
        ("--ntasks-per-node=8", "", "has --ntasks-per-node, .* use parallel.gpus_per_host"),
        ("-n 16", "", "has --ntasks, .* use parallel.gpus_per_host"),
        (
            "",
            "5",
            r"slurm.time=5 is 300 s, and the job saves 300 s .*; set slurm.time=7 \(minutes\) or more, or save .*@239",
        ),
        ("", "00:06:00", "is 360 s"),
        ("", "5:30", "is 330 s"),
        ("--time=2 --signal=B:USR1@100", "1-0", "resilience.sbatch=--time=2 is 120 s, and the job saves 100 s"),
        ("--time 0-0:1", "", r"is 60 s, .* set resilience.sbatch=--time=7 \(minutes\) or more$"),
    ],
)
def test_options_that_contradict_the_script_are_refused(sbatch, time, message):
    config = Config(resilience=ResilienceConfig(cluster="slurm", sbatch=sbatch), slurm=SlurmConfig(time=time))
    with pytest.raises(ConfigError, match=message):
        make_batch_script(config, gpus=0, overrides=[], blocked=[], path="")


@pytest.mark.parametrize(
    ("sbatch", "time"),
    [
        ("--mail-user a@b.c", "7"),
        ("--signal=B:SIGUSR1@60", "3"),
        ("--signal B:USR1", "0"),
        ("-p gpu", "1-0"),
        ("", "6:01"),
    ],
)
def test_other_options_and_longer_limits_are_accepted(sbatch, time):
    config = Config(resilience=ResilienceConfig(cluster="slurm", sbatch=sbatch), slurm=SlurmConfig(time=time))
    assert "#SBATCH --requeue" in make_batch_script(config, gpus=0, overrides=[], blocked=[], path="")


def test_each_option_of_the_job_follows_its_reason():
    lines = script().splitlines()
    own_lines = lines[: lines.index("# resilience.sbatch")]
    options = [i for i, line in enumerate(own_lines) if line.startswith("#SBATCH")]
    assert len(options) > 10
    assert all(lines[i - 1].startswith("# ") for i in options)
    assert "#SBATCH --mem=0" in lines


def sbatch_words(text: str) -> list[str]:
    """Return the words that sbatch reads in a script's options, as `_get_argument` of its sources does."""
    arguments: list[str] = []
    for line in text.split("\n"):
        if not line.startswith("#SBATCH"):
            if line and not line.startswith("#"):
                break
            continue
        remaining = iter(line.removeprefix("#SBATCH"))
        word = ""
        quote = ""
        started = False
        for character in remaining:
            if character == "\\":
                word, started = word + next(remaining), True
            elif quote:
                quote, word = ("", word) if character == quote else (quote, word + character)
            elif character in "'\"":
                quote, started = character, True
            elif character == "#":
                break
            elif character.isspace():
                arguments += [word] if started else []
                word, started = "", False
            else:
                word, started = word + character, True
        assert not quote, line
        arguments += [word] if started else []
    return arguments


WORD = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)


@given(st.lists(WORD, min_size=1), WORD)
def test_sbatch_reads_every_option_as_it_was_given(values, comment):
    options = [f"--option{number}={value}" for number, value in enumerate(values)]
    given_words = ["-p", "gpu", "--comment", comment] + options
    limits = ResilienceConfig(cluster="slurm", sbatch=shlex.join(given_words))
    text = make_batch_script(Config(resilience=limits), 0, [], [], "")
    assert sbatch_words(text)[-len(given_words) :] == given_words


@given(st.dictionaries(st.sampled_from(["account", "partition", "qos", "constraint", "reservation"]), WORD))
def test_sbatch_reads_the_slurm_section_as_it_was_given(settings):
    text = make_batch_script(Config(slurm=SlurmConfig(**settings)), 0, [], [], "")
    assert {f"--{key}={value}" for key, value in settings.items()} <= set(sbatch_words(text))


def test_slurm_section_is_explained_and_stands_before_free_options():
    settings = SlurmConfig(time="1-12", attempts=4, partition="gpu")
    text = make_batch_script(Config(slurm=settings, resilience=ResilienceConfig(sbatch="--time=50")), 0, [], [], "")
    lines = text.splitlines()
    assert lines[lines.index("#SBATCH --time=1-12") - 1] == "# The time limit of one job (slurm.time)"
    assert "#SBATCH --array=1-4%1" in lines
    words = sbatch_words(text)
    assert words.index("--time=50") > words.index("--time=1-12")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["slurm.container=pyxis"], "needs an image; set slurm.image"),
        (["slurm.image=a.sif"], "set slurm.container"),
        (["slurm.attempts=3", "slurm.resubmission=requeue"], "set only one"),
        (["slurm.time=tomorrow"], r"slurm\.time"),
        (['slurm.mounts=["data:/data"]'], r"slurm\.mounts"),
    ],
)
def test_wrong_slurm_section_names_the_key(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load(None, overrides)


def test_pyxis_gets_image_name_and_mounts_with_the_run_folder():
    settings = SlurmConfig(container="pyxis", image="docker://site/megascale:1", mounts=["/data:/data:ro"])
    assert make_container_arguments(settings, "17", Path("/home/me/it's 100%")) == [
        "--container-image=docker://site/megascale:1",
        "--container-name=megascale-17",
        "--container-mounts=/data:/data:ro,/home/me/it's 100%:/home/me/it's 100%",
        "--container-mount-home",
    ]
    mounted = SlurmConfig(container="pyxis", image="i", mounts=["/big:/home"])
    assert "--container-mounts=/big:/home" in make_container_arguments(mounted, "17", Path("/home/me/run"))
    with pytest.raises(ConfigError, match="has a comma"):
        make_container_arguments(settings, "17", Path("/home/a,b"))


def test_apptainer_runs_the_program_in_the_image(tmp_path, monkeypatch):
    """A stand-in that reads apptainer's options runs what follows the image."""
    program = tmp_path / "apptainer"
    program.write_text(
        "#!/bin/bash\n[ $1 = exec ] || exit 2\nshift\n"
        'while :; do case "$1" in --nv) shift;; --bind) echo "bind $2"; shift 2;; -*) exit 2;; *) break;; esac; done\n'
        'echo "image $1"; shift; exec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = SlurmConfig(container="apptainer", image="/images/a b.sif", mounts=["/data:/mnt"])
    command = make_container_arguments(settings, "17", Path("/runs/x")) + ["echo", "a b"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["bind /data:/mnt", "bind /runs/x:/runs/x", "image /images/a b.sif", "a b"]


@pytest.mark.parametrize("folder", ["my runs", "it's", 'say "so"', "100%", "%j", "a#b", "a\tb"])
def test_the_log_is_next_to_the_run_whatever_its_folder_is_called(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    config = Config(train=TrainConfig(runs=folder, name="demo"), resilience=ResilienceConfig(cluster="slurm"))
    text = make_batch_script(config, 0, [f"--train.runs={folder}"], [], "")
    (output,) = [word for word in sbatch_words(text) if word.startswith("--output=")]
    pattern = output.removeprefix("--output=")
    # Slurm's replacements.
    path = re.sub("%(.)", lambda escape: {"%": "%", "j": "17"}[escape[1]], pattern)
    assert path == f"{tmp_path}/{folder}/demo.slurm-17.out"


@pytest.mark.parametrize(
    "settings",
    [
        {"runs": "a\n#SBATCH --wrap=evil"},
        {"runs": "a\rb"},
        {"runs": "a\\b"},
        {"sbatch": "--comment='a\nb'"},
    ],
)
def test_what_a_batch_script_cannot_hold_is_refused(settings):
    limits = ResilienceConfig(cluster="slurm", sbatch=settings.pop("sbatch", ""))
    with pytest.raises(ConfigError, match=r"sbatch cannot hold|without a backslash"):
        make_batch_script(Config(train=TrainConfig(**settings), resilience=limits), 0, [], [], "")


@pytest.mark.parametrize("key", ["sbatch", "ssh"])
def test_a_quotation_without_an_end_names_the_key(key):
    with pytest.raises(ConfigError, match=rf"resilience\.{key}=.*close each quotation"):
        load(None, [f"resilience.{key}=--comment='a"])


class Batch:
    """The script at work in a folder, with a driver that ends as told and an sbatch that keeps what it is given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ends: list[object], **slurm: object):
        self.folder = folder
        for name, text in (("driver", DRIVER), ("sbatch", '#!/bin/bash\n{ echo "$@"; cat; } > submitted\n')):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "ends").write_text("".join(f"{end}\n" for end in ends))
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.executable", str(folder / "driver"))
        for name in ("scontrol", "scancel"):
            (folder / name).write_text(f'#!/bin/bash\necho "{name} $@" >> commands\n')
            (folder / name).chmod(0o755)
        (folder / "job.sbatch").write_text(script(slurm=SlurmConfig(**slurm)))
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "9"}
        self.process = subprocess.Popen(["bash", "job.sbatch"], env=env)

    def requests(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines()

    def until_up(self) -> None:
        while not (self.folder / "up").exists():
            assert self.process.poll() is None
            time.sleep(POLL_INTERVAL)


START = "-P -m megascale launch job file.toml --nodes=2"


def test_a_driver_that_is_killed_is_started_again_and_its_exit_code_is_the_jobs(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, [137, 139, 4])
    assert batch.process.wait(30) == 4
    assert batch.requests() == [START] * 3
    assert not (tmp_path / "submitted").exists()


def test_one_that_is_killed_again_and_again_is_given_up(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, [137] * 20)
    assert batch.process.wait(30) == 137
    assert len(batch.requests()) == 6


def test_before_the_time_limit_the_driver_saves_and_the_next_job_is_submitted(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, ["wait"])
    batch.until_up()
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.process.wait(30) == 0
    assert batch.requests() == [START, f"{START} --dry-run"]
    assert (tmp_path / "submitted").read_text() == "--dependency=afterany:17\nthe next job\n"


def test_where_nodes_may_not_submit_the_job_is_queued_again(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, ["wait"], resubmission="requeue")
    batch.until_up()
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.process.wait(30) == 0
    assert (tmp_path / "commands").read_text() == "scontrol requeue 17\n"
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize(("ends", "code"), [([0], 0), ([3], 3)])
def test_the_end_of_training_cancels_the_attempts_that_are_left(tmp_path, monkeypatch, ends, code):
    batch = Batch(tmp_path, monkeypatch, ends, attempts=3)
    assert batch.process.wait(30) == code
    assert (tmp_path / "commands").read_text() == "scancel --state=PENDING 9\n"


def test_at_the_time_limit_the_next_attempt_of_the_array_is_left(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, ["wait"], attempts=3)
    batch.until_up()
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.process.wait(30) == 0
    assert not (tmp_path / "commands").exists()
    assert not (tmp_path / "submitted").exists()


def test_a_cancelled_job_saves_and_is_not_submitted_again(tmp_path, monkeypatch):
    batch = Batch(tmp_path, monkeypatch, ["wait"])
    batch.until_up()
    batch.process.send_signal(signal.SIGTERM)
    assert batch.process.wait(30) == 130
    assert batch.requests() == [START]
    assert not (tmp_path / "submitted").exists()


def test_what_is_missing_is_said(tiny, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"within an allocation|needs Slurm's commands"):
        CLUSTERS["slurm"].describe_remote_machines(Config())
    with pytest.raises(ConfigError, match=r"resilience\.cluster=local; add --cluster slurm"):
        CliRunner().invoke(app, ["launch", str(tiny), "--dry-run"], catch_exceptions=False)


def test_tasks_per_node_of_the_allocation_have_no_effect_and_a_note(monkeypatch, capsys, tmp_path):
    for value, note in (("1", ""), ("8", "note: --ntasks-per-node=8 of this allocation has no effect")):
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", value)
        slurm._report_ignored_tasks()
        output = capsys.readouterr().err
        assert output.startswith(note)
        assert bool(output) == bool(note)
    cluster = slurm.SlurmCluster.__new__(slurm.SlurmCluster)
    cluster._settings, cluster._job_id, cluster._cores, cluster.run = SlurmConfig(), "7", {}, tmp_path
    # srun would take the value of the variable without the option.
    assert "--ntasks-per-node=1" in cluster.make_command(Host("n1", "n1"), ["agent"])


def test_lists_of_cores_and_gpus(monkeypatch):
    assert expand_counts("4(x2),8,2(x1)") == [4, 4, 8, 2]
    for name in ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert count_gpus_per_node(Config()) == 8  # parallel.gpus_per_host is asked for
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert count_gpus_per_node(Config()) == 0  # none were given
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert count_gpus_per_node(Config()) == 4
