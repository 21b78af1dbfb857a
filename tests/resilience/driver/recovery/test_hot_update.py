"""Changed settings of a job, and what becomes of them when it is launched again."""

from __future__ import annotations

import pytest

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience.driver.recovery.hot_update import (
    apply_settings,
    describe_changes_since_launch,
    settings_file,
    undo_settings,
)


@pytest.fixture
def run(tmp_path):
    settings_file(tmp_path).parent.mkdir(parents=True)
    load().write(settings_file(tmp_path))
    return tmp_path


def test_the_next_launch_says_what_it_takes_back(run):
    config = load()
    assert describe_changes_since_launch(run, config) == ""
    new, changed = apply_settings(run, config, ["lr.peak=1e-4"])
    assert changed == ("lr.peak: 0.0003 -> 0.0001",)
    output = describe_changes_since_launch(run, config)
    assert "lr.peak 0.0001 -> 0.0003" in output
    assert describe_changes_since_launch(run, new) == ""
    # The driver's own settings are each launch's.
    assert describe_changes_since_launch(run, load(overrides=["--lr.peak=1e-4", "--resilience.window=3"])) == ""
    assert undo_settings(run) == config
    assert describe_changes_since_launch(run, config) == ""


def test_a_first_launch_has_nothing_to_say(tmp_path):
    assert describe_changes_since_launch(tmp_path, load()) == ""


def test_what_a_running_job_cannot_take_is_refused_and_nothing_written(run):
    before = settings_file(run).read_bytes()
    for setting, why in (
        ("model.layers=9", "cannot be changed"),
        ("lr.peak=0.0003", "already"),
        ("train.seed=5", "accept"),
    ):
        with pytest.raises(ConfigError, match=why):
            apply_settings(run, load(), [setting])
    assert settings_file(run).read_bytes() == before
