"""One ordered hierarchy of every time-out that takes part in recovery, checked before anything starts.

The order: a heartbeat interval fits twice into the window; a lost node or a hang is noticed before ranks give up on a
collective; agents outlast a driver's restart; copies in memory outlast a recovery.
"""

from __future__ import annotations

from megascale.config import Config
from megascale.errors import ConfigError
from megascale.resilience.rules.silence import FLOOR


def check_timeouts(config: Config) -> None:
    """Raises ConfigError naming both keys for a pair in the wrong order."""
    r, meet, saving = config.resilience, config.rendezvous, config.checkpoint
    pairs = [
        ("resilience.interval", r.interval, 2.0, "resilience.window", r.window, "one late heartbeat is no lost node"),
        ("resilience.window", r.window, 1.0, "rendezvous.timeout", meet.timeout, "a node lost during the start shows"),
        (
            "resilience.window",
            r.window,
            1.0,
            "rendezvous.group_timeout",
            meet.group_timeout,
            "the driver finds the lost node before its peers give up and look guilty",
        ),
        ("resilience.window", r.window, 2.0, "resilience.orphan", r.orphan, "agents outlast a driver's restart"),
        (
            "resilience.window",
            r.window,
            1.0,
            "resilience.first_step",
            r.first_step,
            "a lost node is not taken for a slow start",
        ),
    ]
    pairs.append(
        (
            "the least time to wait on a hang",
            FLOOR,
            1.0,
            "rendezvous.group_timeout",
            meet.group_timeout,
            "the driver names who hangs before ranks abort the collective",
        )
    )
    pairs.append(
        ("resilience.lease", r.lease, 1.0, "resilience.orphan", r.orphan, "agents outlast a change of drivers")
    )
    if saving.background:
        pairs.append(
            (
                "resilience.window",
                r.window,
                1.0,
                "checkpoint.linger",
                saving.linger,
                "copies of the state in memory are still there when ranks start again",
            )
        )
    if saving.background and r.agent_lease is not None:
        pairs.append(
            (
                "resilience.window and resilience.agent_lease",
                r.window + r.agent_lease,
                1.0,
                "checkpoint.linger",
                saving.linger,
                "copies of the state in memory outlast the wait for ranks of a node that nobody reaches",
            )
        )
    for small, a, factor, large, b, why in pairs:
        if a * factor > b:
            times = f"{factor:g} x " if factor != 1 else ""
            raise ConfigError(
                f"{small}={a:g} s is too long for {large}={b:g} s: {times}{small} must not be above {large}, so that "
                f"{why}; lower {small} or raise {large}"
            )
