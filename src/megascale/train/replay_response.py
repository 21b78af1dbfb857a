"""Actions after a failed replay check: write evidence into the run folder, write an event, and end this start.

`RUN/replays/step-N.json` has the evidence, `step-N-2.json` the evidence of a second mismatch in the same step. Before
any rank ends, `RUN/replays/unconfirmed.json` names the last step that a replay has confirmed. The next start does not
load states of later steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import torch

from megascale.checkpoint.format import step_folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import ResilienceConfig
from megascale.core import strict_json
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.untrusted_files import read_small_text
from megascale.errors import TrainingError
from megascale.train.rank_info import find_device_kind
from megascale.train.replay_check import ReplayEvidence
from megascale.train.reporter import Reporter
from megascale.train.run_folder import RunFolder

_UNCONFIRMED = "unconfirmed.json"


def describe_device(device: torch.device) -> str:
    """Return the name of a rank's device and host, such as `NVIDIA H100 3 of node-7`."""
    node = os.environ.get("MEGASCALE_NODE") or socket.gethostname()
    if device.index is None:
        return f"{find_device_kind(device)} of {node}"
    return f"{find_device_kind(device)} {device.index} of {node}"


class ReplayResponse:
    """Acts on the evidence of a failed replay check, as `resilience.replay_action` says.

    Args:
        reporter: writes events.
        peers: all ranks.
    """

    def __init__(
        self, settings: ResilienceConfig, folder: RunFolder, reporter: Reporter, rank: int, peers: Peers
    ) -> None:
        self._peers = peers
        self._settings = settings
        self._folder = folder
        self._reporter = reporter
        self._rank = rank

    def act(self, evidence: ReplayEvidence) -> None:
        """Write the evidence and an event. Collective.

        Raises TrainingError on all ranks, unless resilience.replay_action is "alert".
        """
        verdict, action = evidence.verdict, self._settings.replay_action
        file, error = self._keep_evidence(evidence)
        self._reporter.write_event(
            Event.REPLAY_MISMATCH,
            step=verdict.step,
            ranks=list(verdict.ranks),
            named=verdict.is_sure,
            action=action,
            operation=verdict.action,
            tensor=verdict.tensor,
            message=evidence.message,
            evidence=file,
        )
        if action == "alert":
            self._reporter.log_line(f"{evidence.message}; resilience.replay_action=alert lets training go on")
            return
        moment = "after" if evidence.is_after_update else "before"
        if error:
            outcome = f"the evidence cannot be written, and a resume loads the newest state: {error}"
        else:
            outcome = f"{file} has the evidence"
        mismatch = TrainingError(
            f"{evidence.message}. Training stopped {moment} the update of step {verdict.step}; {outcome}. Test the "
            "device: megascale diagnose"
        )
        kind = ExitKind.LOST_PEER
        if self._rank in verdict.ranks:
            kind = ExitKind.WRONG_BITS
        raise attach_record(mismatch, kind, rank=verdict.ranks[0], step=verdict.step, subject=verdict.tensor)

    def _keep_evidence(self, evidence: ReplayEvidence) -> tuple[str, str]:
        """Write the evidence on rank 0. Return its file and an error message, "" if there is none.

        All ranks wait until the files are written. A driver may end all ranks as soon as one of them ends.
        """
        step = evidence.verdict.step
        file, error = "", ""
        if self._reporter.is_leader:
            try:
                folder = self._folder.path / "replays"
                folder.mkdir(parents=True, exist_ok=True)
                if self._settings.replay_action != "alert":
                    _write_record(folder / _UNCONFIRMED, {"confirmed": evidence.confirmed_step, "mismatch": step})
                evidence_file = _find_unused(folder, f"step-{step}")
                _write_record(evidence_file, evidence.to_record())
                file = str(evidence_file)
            except OSError as os_error:
                error = str(os_error)
        file, error = self._peers.broadcast((file, error), tuple[str, str])
        return file, error


def _find_unused(folder: Path, stem: str) -> Path:
    """Return the first of STEM.json, STEM-2.json and so on that does not exist."""
    file, number = folder / f"{stem}.json", 1
    while file.exists():
        number += 1
        file = folder / f"{stem}-{number}.json"
    return file


def skip_unconfirmed_states(folder: RunFolder, location: Path | str) -> str:
    """Let the next load skip the states that no replay has confirmed, and return a line for the user.

    Do nothing and return "" unless an earlier start ended at a mismatch. Checkpoints in storage are marked as damaged:
    a load tries them last. Call it on rank 0 before a load.
    """
    try:
        record = json.loads(read_small_text(folder.path / "replays" / _UNCONFIRMED))
        confirmed, mismatch_step = int(record["confirmed"]), int(record["mismatch"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder.path / 'replays' / _UNCONFIRMED} cannot be read: {error}; the newest state is loaded"
    storage = open_storage(location)
    commits, _ = step_folders.list_commits(storage)
    reason = f"the replay of step {mismatch_step} gave other bits"
    if not any(commit.step <= confirmed for commit in commits):
        return f"{reason}, and no saved state is as old as step {confirmed}, the last confirmed one"
    step_folders.renew_identity(storage)  # so that no state in memory, which has the old identity, is loaded
    for commit in commits:
        if commit.step > confirmed:
            step_folders.mark_damaged(storage, commit)
    return f"states after step {confirmed} are passed over: {reason}"


def confirm_start(folder: RunFolder) -> None:
    """Forget the mismatch of an earlier start, because this start continues from another state."""
    with contextlib.suppress(FileNotFoundError):
        (folder.path / "replays" / _UNCONFIRMED).unlink()


def _write_record(file: Path, record: object) -> None:
    temporary = file.with_suffix(".partial")
    with temporary.open("w") as stream:
        stream.write(strict_json.dumps(record) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
