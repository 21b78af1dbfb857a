"""The one hierarchy of time-outs: each pair in the wrong order is named with both keys and the remedy."""

from __future__ import annotations

import pytest

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience.driver.launch_checks import check_timeouts


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (["resilience.interval=3"], ("resilience.interval=3", "resilience.window=5")),
        (["rendezvous.timeout=4"], ("resilience.window=5", "rendezvous.timeout=4")),
        (["rendezvous.group_timeout=4"], ("resilience.window=5", "rendezvous.group_timeout=4")),
        (["rendezvous.group_timeout=8"], ("hang=10", "rendezvous.group_timeout=8")),
        (["resilience.orphan=9"], ("resilience.window=5", "resilience.orphan=9")),
        (["resilience.lease=700"], ("resilience.lease=700", "resilience.orphan=600")),
        (["resilience.first_step=4"], ("resilience.window=5", "resilience.first_step=4")),
        (["checkpoint.background=true", "checkpoint.linger=4"], ("resilience.window=5", "checkpoint.linger=4")),
        (
            ["checkpoint.background=true", "resilience.agent_lease=56"],
            ("resilience.window and resilience.agent_lease=61", "checkpoint.linger=60"),
        ),
    ],
)
def test_a_pair_in_the_wrong_order_is_named(settings, keys):
    config = load(None, [f"--{setting}" for setting in settings])
    with pytest.raises(ConfigError) as error:
        check_timeouts(config)
    for key in keys:
        assert key in str(error.value)


def test_the_defaults_are_in_order():
    check_timeouts(load(None, []))
    check_timeouts(load(None, ["--checkpoint.background=true", "--resilience.agent_lease=8"]))
    check_timeouts(load(None, ["--checkpoint.linger=4"]))  # No process waits for a missing service.


@pytest.mark.parametrize(
    "settings",
    [
        ["resilience.interval=2.5"],
        ["rendezvous.timeout=5", "resilience.window=5"],
        ["rendezvous.group_timeout=10"],
        ["resilience.orphan=10", "resilience.lease=10"],
        ["resilience.first_step=5"],
        ["checkpoint.background=true", "checkpoint.linger=5"],
        ["checkpoint.background=true", "resilience.agent_lease=55"],
    ],
)
def test_time_outs_that_are_equal_are_in_order(settings):
    check_timeouts(load(None, [f"--{setting}" for setting in settings]))


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (["resilience.interval=3"], "resilience.window=5 s: 2 x resilience.interval must not be above"),
        (["rendezvous.timeout=4"], "rendezvous.timeout=4 s: resilience.window must not be above"),
    ],
)
def test_a_factor_is_named_where_there_is_one(settings, order):
    with pytest.raises(ConfigError, match=order):
        check_timeouts(load(None, [f"--{setting}" for setting in settings]))
