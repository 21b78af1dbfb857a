"""Layouts of the corruption campaign."""

from __future__ import annotations

from tests.exact.cases import TWO_LAYERS, case
from tests.exact.test_experts import BALANCED, experts_case

_MODEL = {**TWO_LAYERS, "dropout": 0.1}

LAYOUTS = {
    "DP2 ZeRO-0": case(1, 1, 2, microbatches=2, zero=0, model=_MODEL),
    "DP2 ZeRO-1": case(1, 1, 2, microbatches=2, zero=1, model=_MODEL),
    "DP3 ZeRO-2": case(1, 1, 3, microbatches=2, zero=2, model=_MODEL),
    "DP4 ZeRO-3": case(1, 1, 4, microbatches=1, zero=3, model=_MODEL),
    "TP2 DP2 ZeRO-1": case(2, 1, 2, microbatches=2, zero=1, model=_MODEL),
    "TP2 DP3 ZeRO-2": case(2, 1, 3, microbatches=2, zero=2, model=_MODEL),
    "PP2 DP2 ZeRO-1": case(1, 2, 2, microbatches=3, zero=1, model=_MODEL),
    "PP2 DP3 ZeRO-3 interleaved": case(
        1, 2, 3, microbatches=2, virtual=2, zero=3, model={**_MODEL, "layers": 4}, train={"precision": "bfloat16"}
    ),
    "TP2 DP2 ZeRO-2 float8": case(
        2, 1, 2, microbatches=2, zero=2, model=_MODEL, train={"linear_precision": "float8", "precision": "bfloat16"}
    ),
    "DP3 ZeRO-1 LAMB": case(1, 1, 3, microbatches=2, zero=1, model=_MODEL, optimizer={"name": "lamb"}),
    "TP2 DP2 ZeRO-3 Muon": case(2, 1, 2, microbatches=2, zero=3, model=_MODEL, optimizer={"name": "muon"}),
    "CP2 DP2 ZeRO-1": case(1, 1, 2, microbatches=2, zero=1, model=_MODEL, parallel={"context": 2}),
    "TP2 DP2 experts": experts_case(2, 1, 2, experts=BALANCED, zero=1),
    "TP2 DP3 experts": experts_case(2, 1, 3, experts=BALANCED, zero=3),
}
