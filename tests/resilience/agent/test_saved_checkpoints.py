"""The newest complete checkpoint of another trainer, by the names that five trainers give to theirs."""

from __future__ import annotations

import pytest

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience.agent.saved_checkpoints import TooManyEntriesError, find_saved_step


@pytest.mark.parametrize(
    ("pattern", "complete", "incomplete"),
    [
        ("step-{step}/.metadata", "step-20/.metadata", "step-25/__0_0.distcp"),
        ("iter_{step}/.metadata", "iter_0000020/.metadata", "iter_0000025/common.pt"),
        ("checkpoint-{step}/trainer_state.json", "checkpoint-20/trainer_state.json", "checkpoint-25/model.safetensors"),
        ("epoch=*-step={step}.ckpt", "epoch=3-step=20.ckpt", "epoch=3-step=25.ckpt.tmp"),
        ("model_{step}.pt", "model_000020.pt", "model_000025.pt.tmp"),
    ],
)
def test_the_newest_complete_checkpoint_counts(pattern, complete, incomplete, tmp_path):
    assert find_saved_step(str(tmp_path / pattern)) == 0
    for name in (complete, complete.replace("20", "15"), incomplete, complete.replace("20", "last")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_saved_step(str(tmp_path / pattern)) == 20


def test_a_pattern_without_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"foreign.checkpoints='out/last' must have {step} once"):
        load(None, ["--foreign.checkpoints=out/last"])


def test_brackets_and_question_marks_in_a_path_stand_for_themselves(tmp_path):
    folder = tmp_path / "run[1]?"
    (folder / "step-30").mkdir(parents=True)
    assert find_saved_step(str(folder / "step-{step}")) == 30


def test_a_search_reads_a_limited_number_of_names(tmp_path):
    """The names of a folder come in any order, so a search that is cut short does not know the newest."""
    for step in range(1, 31):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    pattern = str(tmp_path / "step-{step}/.metadata")
    assert find_saved_step(pattern, max_entries=30) == 30  # files in the step folders are not listed
    with pytest.raises(TooManyEntriesError):
        find_saved_step(pattern, max_entries=29)


def test_any_text_before_and_behind_the_step(tmp_path):
    for name in ("a/run-1/step-10/rank-0.pt", "b/run-1/step-30/rank-1.pt", "b/run-2/step-40/.rank-0.pt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert find_saved_step(str(tmp_path / "*/run-*/step-{step}/*.pt")) == 30


def test_a_link_whose_target_was_removed_is_no_checkpoint(tmp_path):
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-30").symlink_to(tmp_path / "removed")
    assert find_saved_step(str(tmp_path / "step-{step}")) == 20
