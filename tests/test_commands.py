"""The commands of README and documents. They run in a small folder of their own, or are only parsed, with the reason.

Blocks marked `sh` and unmarked blocks have commands. In a block with `$ ` before commands, the other lines are output.
Arguments that make a run small (SMALL) are appended. Commands in running text and tables are parsed.
"""

import importlib
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import click
import pytest
import typer

from megascale.config.reference import find_settings
from tests.forked import Forked

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md"] + sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs/models").glob("*.md"))
BLOCK = re.compile(r"^```(?:sh|console)?\n(.*?)^```", re.M | re.S)
# Programs of the documents' commands. `benchmarks` and `tests.chaos` are only parsed: they take minutes to hours.
PROGRAMS = {
    "megascale": "megascale.cli.main",
    "python -m benchmarks": "benchmarks.__main__",
    "python -m tests.chaos": "tests.chaos.__main__",
}
INLINE = re.compile(rf"`((?:{'|'.join(map(re.escape, PROGRAMS))}) [^`]+)`")
# The name of a setting in the arguments of a command.
SETTING = re.compile(r"--([a-z]+\.[a-z_0-9]+)(?:=|$)")

SHORT_NAMES = {"model.from": "checkpoint.imported"}

# What makes a command small: behind each one that begins so.
ONE_LAYER = ["--model.layers=1", "--model.hidden=32", "--model.heads=2", "--model.sequence_length=32"]
FEW_STEPS = [
    "--train.steps=2",
    "--train.micro_batch=2",
    "--train.global_batch=4",
    "--train.eval_samples=4",
    "--train.sample_tokens=4",
    "--train.device=cpu",
    "--checkpoint.linger=0",
    "--lr.warmup_steps=0",
]
SMALL = {
    r"(train|launch) (examples/(gpt|stdlib-3d)|--model\.preset=(gpt|llama)|job\.toml --node-rank)": ["--dry-run"],
    r"train (runs/|--model\.from)": FEW_STEPS,
    r"launch .*--cluster slurm": ONE_LAYER + FEW_STEPS + ["--train.global_batch=16"],
    r"train": ONE_LAYER + FEW_STEPS,
    r"launch": ONE_LAYER + FEW_STEPS + ["--train.steps=25", "--observe.spans=1", "--resilience.window=20"],
    r"generate": ["--tokens=4"],
}
# What stands in the world where a document speaks of another.
EXISTING = (
    (r"~/", ""),
    (r"/data/runs/first", "runs/kept"),
    (r"runs/(NAME|hour|machine-gone-0)", "runs/kept"),
    (r"^((?:nodes|events) runs)/(?:stdlib|demo)", r"\1/kept"),
    (r"--steps \d+-\d+|--before .* --after \S+", "--steps 3-10"),
    (r"^(decline .*)--steps 3-10", r"\1--before 1-5 --after 6-10"),
    (r"--rank 5|--ranks 0-7", "--rank 0"),
    (r"^(timeline .*)--rank 0", r"\1--ranks 0"),
    (r"--step 300", "--step 10"),
    (r" --node-rank$", ""),
    (r"docs/images/", ""),
    (r"--gpus 1024 --model.preset=llama3.1-70b", "--gpus 8 --model.preset=llama3.1-8b"),
)
# Python that runs before a command. The time of the measured GEMMs is not what the documents' commands are run for.
BEFORE = {
    "diagnose": "from megascale.resilience.diagnose import compute; compute.GEMM_SECONDS = 0.01",
}
# Commands that are only parsed, with reasons.
PARSED = {
    r"bench train llama-8b .*--parallel\.(context|data)=4": "needs four GPUs",
    r"launch --model\.preset=qwen3": "needs eight GPUs",
    r"(evaluate|generate) runs/long": "needs a run of four GPUs",
    r"--data\.train=datasets/code/train,": "needs two data sets (tests/data/dataset)",
    r"data build --stdlib": "half a minute; `make train` does it",
    r"launch examples/stdlib\.toml --nodes 4": "as the two nodes of quickstart.md",
    r"launch --per-node 8 .*-- python train\.py": "needs a trainer (tests/resilience/test_foreign.py)",
    r"doctor --cluster|launch .*--cluster (ssh|manual|kubernetes)|agent ": "needs machines (tests/resilience)",
    r"\.access": "needs a job elsewhere (tests/resilience/driver/api)",
    r"bench kernels|python -m ": "minutes to hours, or a GPU (tests/benchmarks, tests/chaos)",
    r"\b(RUN|FILE)\b": "a placeholder",
    r"hang |faults inject|diagnose --pairs": "needs what is broken, or other machines (tests/resilience)",
    r"driver_metrics=0\.0\.0\.0": "opens fixed ports of the machine (tests/kubernetes)",
    r"^dashboard ": "serves until Ctrl-C (tests/observe/dashboard)",
    r"^spans .*--steps \d+ *($|#)": "needs a run that trains (tests/observe)",
    r"=network\.env|placement\.json": "needs a file of another command (tests/simulate)",
    r"^network flows |^simulate step .*--fabric|^simulate search .*--days": "half a minute or more (tests/simulate)",
}


def commands(page: Path) -> list[str]:
    """Return the commands of a page's blocks without comments and prompts. Continued lines are joined."""
    result = []
    for block in BLOCK.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            arguments = " ".join(line.split())
            if arguments.startswith("torchrun ") and " -m megascale " in arguments:
                arguments = "megascale " + arguments.partition(" -m megascale ")[2] + " --node-rank"
            if arguments.startswith("megascale "):
                result.append(arguments.removeprefix("megascale "))
            elif arguments.startswith(tuple(PROGRAMS)):
                result.append(arguments)
    return result


def why_not(command: str) -> str:
    """Return why a command is only parsed, or an empty string if it runs."""
    return next((reason for arguments, reason in PARSED.items() if re.search(arguments, command)), "")


@cache
def command_line(program: str) -> click.Command:
    """Return the command line of a program."""
    return typer.main.get_command(importlib.import_module(PROGRAMS[program]).app)


def parse(command: str) -> None:
    """Parse a command line. Fail for an unknown command, option or setting."""
    program = next((name for name in PROGRAMS if command.startswith(f"{name} ")), "megascale")
    arguments = [word for word in shlex.split(command.removeprefix(program), comments=True) if word != "--node-rank"]
    arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
    at, context = command_line(program), None
    while hasattr(at, "resolve_command") and arguments:
        context = at.make_context("megascale", arguments, parent=context, resilient_parsing=True)
        _, at, arguments = at.resolve_command(context, arguments)
    for key in filter(None, (SETTING.match(word) for word in arguments)):
        name = SHORT_NAMES.get(key[1], key[1])
        assert [setting.key for setting in find_settings(name)] == [name], command
    if arguments or not hasattr(at, "resolve_command"):
        at.make_context(command, arguments)


RUN = [(page.name, c) for page in PAGES for c in commands(page) if not why_not(c)]
ONLY_PARSED = [(page.name, c, why_not(c)) for page in PAGES for c in commands(page) if why_not(c)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a folder with small texts, a data set, a run and a model to import, as the documents have them."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "examples").symlink_to(ROOT / "examples")
    for texts in ("my/texts", "texts", "crawl"):
        (folder / texts).mkdir(parents=True)
        for file in sorted((ROOT / "src/megascale/config").glob("*.py"))[:4]:
            shutil.copy(file, folder / texts / f"{file.stem}.txt")
    shutil.copy(ROOT / "LICENSE", folder / "book.txt")
    shutil.copy(ROOT / "examples/stdlib.toml", folder / "job.toml")
    run(folder, "data build --input my/texts --vocab-size 300 --out datasets/stdlib")
    run(folder, "train examples/stdlib.toml")
    run(folder, "convert export runs/stdlib --out models/pythia-160m")
    (folder / "llama").mkdir()
    shutil.copy(folder / "datasets/stdlib/tokenizer.json", folder / "llama/tokenizer.json")
    return folder


def run(folder: Path, command: str) -> None:
    """Run a command of the documents in `folder`, made small; an error of its own fails."""
    command = command.partition(" #")[0]
    small = next((more for begin, more in SMALL.items() if re.match(begin, command)), [])
    for theirs, ours in EXISTING:
        command = re.sub(theirs, ours, command)
    arguments = shlex.split(command.partition(" > ")[0]) + small
    process = Forked(arguments, env={"COLUMNS": "200"}, cwd=folder, before=BEFORE.get(arguments[0], ""))
    try:
        output, _ = process.communicate(timeout=240)
        # Self-checks fail on a machine that other work keeps busy; that is their answer, not an error of the command.
        allowed = (0, 1) if arguments[0] == "diagnose" and "Traceback" not in output else (0,)
        assert process.wait() in allowed, f"megascale {shlex.join(arguments)}\n{output}"
    finally:
        process.kill()


@pytest.mark.timeout(900)  # about 90 commands, one after another
def test_commands_run(world, record_property):
    done: dict[str, str] = {}
    for page, command in sorted(RUN, key=lambda pair: pair[0] != "quickstart.md"):  # which launches what others look at
        if command.partition(" #")[0] not in done:
            run(world, command)
        done[command.partition(" #")[0]] = page
    record_property("documents: commands run", len(done))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_running_text_are_parsed(page):
    commands = {" ".join(arguments.split()) for arguments in INLINE.findall(page.read_text())}
    for command in sorted(commands):
        if not re.search(r"\.\.\.|\[|\b[A-Z][A-Z]+\b|\b[A-Z]\b", command):  # has an omission or a placeholder
            try:
                parse(command)
            except Exception as error:
                if type(error).__name__ not in ("MissingParameter", "BadOptionUsage", "Exit"):  # a name, or --help
                    pytest.fail(f"{command}: {type(error).__name__}: {error}")


def test_commands_that_are_not_run_are_parsed(record_property):
    for page, command, why in ONLY_PARSED:
        try:
            parse(command)
        except Exception as error:
            pytest.fail(f"{page}: megascale {command}: {error}")
        record_property("documents: parsed only", f"{page}: megascale {command.partition(' #')[0]}: {why}")
    run_commands = {command.partition(" #")[0] for _, command in RUN}
    # Measurements and campaigns, which start with python, are never run here.
    parsed_commands = {c.partition(" #")[0] for _, c, _ in ONLY_PARSED if not c.startswith("python ")}
    assert len(parsed_commands) <= (len(run_commands) + len(parsed_commands)) / 3
