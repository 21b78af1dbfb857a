"""Whether starting again helps: counts starts that brought no new step, and names the step that ends them all.

Every fault that ends a start is counted here, whatever its cause and whatever the rules make of it (`Response.act` is
the one caller): a job whose starts bring nothing new ends after `resilience.no_progress_limit` of them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megascale.core.python_process import module_command
from megascale.core.status import FAILED_IN_STEP
from megascale.resilience.driver.state.job_state import JobState
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.verdicts import Verdict

KEPT = 50  # ends that are remembered
NAMING = 30.0  # seconds that looking up a step's samples may take
_SHOWN = 16  # windows of one file that a sentence lists


def find_end_step(verdicts: Sequence[Verdict], workers: Iterable[Worker]) -> int:
    """The step in which a start ended, 0 if not within a step (while starting, loading, saving or evaluating).

    verdicts: what it was ended for; their ranks' steps count, or all ranks' where none is to blame.
    """
    blamed = {rank for verdict in verdicts for rank in verdict.ranks}
    steps: Counter[int] = Counter()
    for w in workers:
        if blamed and w.rank not in blamed:
            continue
        if w.phase in ("train", FAILED_IN_STEP):
            steps[w.step] += 1
    return steps.most_common(1)[0][0] if steps else 0


def count_start(job: JobState, at: int) -> dict[str, Any]:
    """What changes of `job` after a start has ended in step `at` (0: not within a step)."""
    if job.step > job.best:
        return {"best": job.step, "starts_without_progress": 0, "ends": (at,)}
    return {"starts_without_progress": job.starts_without_progress + 1, "ends": (*job.ends, at)[-KEPT:]}


def count_equal_ends(job: JobState) -> tuple[int, int]:
    """(step, how many of the last starts in a row ended in it); step 0: not within a step."""
    if not job.ends:
        return 0, 0
    times = 0
    for step in reversed(job.ends):
        if step != job.ends[-1]:
            break
        times += 1
    return job.ends[-1], times


def explain_no_progress(job: JobState, limit: int) -> str:
    """Why a job whose starts brought nothing new must not start again."""
    beyond = f"no step beyond {job.best}" if job.best else "no step at all"
    return (
        f"{job.starts_without_progress} starts in a row brought {beyond} (resilience.no_progress_limit={limit}): "
        "starting again does not help"
    )


async def samples_of(run: Path, step: int) -> tuple[str, dict[str, Any]]:
    """The samples that a step trains: (a sentence, {"first", "count", "samples"}); looked up by a process of its own,
    as this package knows no data. Where it cannot find them, the sentence says why."""
    process = await asyncio.create_subprocess_exec(
        *module_command("megascale.cli.main", "data", "samples", str(run), f"--step={step}", "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(NAMING):
            out, said = await process.communicate()
        if process.returncode:
            return f"its samples cannot be named: {said.decode(errors='replace').strip()[-300:]}", {}
        found = json.loads(out)
    except (TimeoutError, ValueError) as error:
        why = str(error) or f"looking them up took over {NAMING:g} s"
        return f"its samples cannot be named: {why}", {}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return samples_sentence(run, step, found), found


def samples_sentence(run: Path, step: int, found: dict[str, Any]) -> str:
    """What `megascale data samples --json` found, in words."""
    first, many = found["first"], found["count"]
    files: dict[tuple[str, int], list[int]] = {}
    for sample in found["samples"]:
        files.setdefault((sample["file"], sample["epoch"]), []).append(sample["window"])
    parts = []
    for (file, epoch), windows in files.items():
        more = f" and {len(windows) - _SHOWN} more" if len(windows) > _SHOWN else ""
        parts.append(f"windows {', '.join(map(str, windows[:_SHOWN]))}{more} of {file} (epoch {epoch})")
    return (
        f"it trains samples {first} to {first + many - 1}: {'; '.join(parts)}; "
        f"`megascale data samples {run} --step {step}` shows them"
    )
