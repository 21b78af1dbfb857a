"""The rules there are: a module of this package adds its own by a decorator, another package by `register_rule`."""

from __future__ import annotations

from collections.abc import Callable

from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import View

Rule = Callable[[View], list[Verdict]]

QUICK: list[Rule] = []  # what must be seen at once, from the newest heartbeats only
SLOW: list[Rule] = []  # what goes through the history of all nodes


def register_rule(rule: Rule, quick: bool = False) -> None:
    """Have every driver of this process apply `rule` as well, once however often it is registered.

    quick: at each look, from the newest heartbeats only; else about once a second, in a thread, through the history.
    """
    rules = QUICK if quick else SLOW
    if rule not in rules:
        rules.append(rule)


def quick(rule: Rule) -> Rule:
    """Decorates a rule that is applied at each look."""
    register_rule(rule, quick=True)
    return rule


def slow(rule: Rule) -> Rule:
    """Decorates a rule that goes through the history."""
    register_rule(rule)
    return rule
