"""Changes of an optimizer's own settings: a question if that optimizer runs, free if no optimizer reads them."""

from __future__ import annotations

import pytest

from megascale.checkpoint.setting_changes import find_changes
from megascale.config import from_tree


@pytest.mark.parametrize(
    ("name", "key", "values", "kind"),
    [
        ("lamb", "trust_max", (1.0, 2.0), "asked"),
        ("adamw", "trust_max", (1.0, 2.0), "free"),
        ("muon", "trust_max", (1.0, 2.0), "free"),
        ("muon", "muon_momentum", (0.9, 0.95), "asked"),
        ("lamb", "muon_momentum", (0.9, 0.95), "free"),
        ("adamw", "beta2", (0.95, 0.99), "asked"),
    ],
)
def test_a_setting_is_asked_about_where_its_optimizer_runs(name, key, values, kind):
    saved, present = (from_tree({"optimizer": {"name": name, key: value}}) for value in values)
    (change,) = find_changes(saved, present, begun=True)
    assert (change.key, change.kind) == (f"optimizer.{key}", kind)
