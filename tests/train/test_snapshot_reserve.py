"""Memory for snapshots in a run that may go on with fewer replicas."""

from __future__ import annotations

import pytest
import torch

from megascale.config import Config
from megascale.core.process_orders import MISSING_VARIABLE
from megascale.train import snapshot_reserve
from megascale.train.rank_info import RankInfo
from megascale.train.snapshot_reserve import compute_snapshot_reserve, order_slots


@pytest.mark.parametrize(
    ("data", "missing_share", "max_missing", "expected"),
    [
        (4, "0", 1, 4 / 3),
        (4, "0", 2, 2.0),
        (3, "0.25", 2, 1.5),
        (2, "0.5", 2, 1.0),
        (2, "0.666667", 4, 1.0),  # 2 of 6, as few as may be
        (2, "0", 5, 2.0),
        (4, None, 2, 1.0),  # no driver
    ],
)
def test_the_reserve_is_for_the_smallest_number_of_replicas(
    data: int, missing_share: str | None, max_missing: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate(
        {
            "parallel": {"data": data},
            "checkpoint": {"background": True, "replicas": True, "memory_interval": 1},
            "resilience": {"continue_replicas": True, "max_missing_replicas": max_missing},
        }
    )
    if missing_share is None:
        monkeypatch.delenv(MISSING_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(MISSING_VARIABLE, missing_share)
    assert compute_snapshot_reserve(config) == pytest.approx(expected)
    without = config.resilience.model_copy(update={"continue_replicas": False})
    assert compute_snapshot_reserve(config.model_copy(update={"resilience": without})) == 1.0


@pytest.mark.parametrize(
    "sections",
    [
        {"checkpoint": {"background": False}},
        {"parallel": {"data": 1, "pipeline": 2}},  # stages differ in size
        {"model": {"preset": "tiny", "vocab_size": 256}},  # its memory is ready before the first step
    ],
)
def test_no_memory_is_ordered_before_the_engine_without_a_use(sections: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"model": {"layers": 24, "hidden": 1024, "heads": 16, "vocab_size": 50304}}
    background = {"checkpoint": {"background": True, "memory_interval": 1}}
    ordered = []
    monkeypatch.setattr(snapshot_reserve, "EarlySlots", lambda *_, **sizes: ordered.append(sizes))
    info = RankInfo(0, 2, 0, 2, torch.device("cpu"))
    order_slots(Config.model_validate({"parallel": {"data": 2}} | model | background), info)
    (sizes,) = ordered
    assert 0 < sizes["size"] < sizes["reserved"]
    assert sizes["spare"] == 2 * sizes["reserved"]  # two slots of the other rank
    replicas = {"checkpoint": {"background": True, "memory_interval": 1, "replicas": True, "slots": 1}}
    order_slots(Config.model_validate({"parallel": {"data": 2}} | model | replicas), info)
    sizes = ordered.pop()
    assert sizes["spare"] == (1 + 2 * 2) * sizes["reserved"]  # a peer's rank has two replicas of its single slot
    config = Config.model_validate({"parallel": {"data": 2}} | model | background | sections)
    assert order_slots(config, info) is None
    assert len(ordered) == 1
