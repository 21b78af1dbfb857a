"""Split of measured rows into development and held-out rows, by a rule fixed before scoring.

Fixed on 2026-11-23, in a commit of its own, before any row was scored in that round of work on the model. Physics may
be changed with development rows in view and constants fitted on them; held-out rows are scored when the model is
frozen, and what is changed after that says so. A row's side never depends on how well it is predicted: a set goes
whole by where and when it was published and at which scale, or row by row by a hash of its configuration.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DEVELOPMENT = "development"
HELD_OUT = "held-out"
BY_HASH = "by hash"


@dataclass(frozen=True)
class MeasuredSet:
    """A set of measured rows.

    Attributes:
        side: DEVELOPMENT, HELD_OUT or BY_HASH.
        why: the reason, which never is a score.
        seen: what the makers of the model had seen of it before the rule was fixed.
        share: of the rows of a set by hash, the share that may be developed on.
    """

    side: str
    reason: str
    prior_knowledge: str
    share: float = 0.5


SETS = {
    "paper-small": MeasuredSet(
        DEVELOPMENT, "Table 2 of the MegaScale paper up to 1,024 GPUs: small scale", "all, 2026-11-21; constants fitted"
    ),
    "paper-large": MeasuredSet(
        HELD_OUT, "Table 2 from 3,072 GPUs on: extrapolation in scale", "all, 2026-11-21; constants fitted on them too"
    ),
    "ablation": MeasuredSet(
        DEVELOPMENT, "Table 3: one technique a row, which is what tells physics apart", "all, 2026-11-21; not fitted"
    ),
    "weak-scaling": MeasuredSet(
        HELD_OUT, "Figure 9, 530B: another model at large scale", "all, 2026-11-21; one rule of the model came from it"
    ),
    "megatron-2021": MeasuredSet(
        DEVELOPMENT, "Table 1 of Narayanan et al. 2021: an earlier publication", "nothing scored before the rule"
    ),
    "vtrain-multi": MeasuredSet(
        BY_HASH, "40 published rows of one kind", "all 40, 2026-11-21; constants fitted on every second row of the file"
    ),
    "h200-peers": MeasuredSet(DEVELOPMENT, "measured here before the model", "all, 2026-11-21; constants fitted"),
    "own-first": MeasuredSet(DEVELOPMENT, "first round of own runs", "all, 2026-11-21; constants fitted on nine"),
    "own-second": MeasuredSet(HELD_OUT, "second round, predicted before measured", "all, 2026-11-21; never fitted"),
    "own-third": MeasuredSet(
        HELD_OUT, "third round, predicted before measured", "nothing before 2026-11-25, when the model stood"
    ),
    "own-fourth": MeasuredSet(
        HELD_OUT,
        "fourth round, predicted before measured",
        "nothing before they were measured; older forms of five of them are in the log",
    ),
    "own-fifth": MeasuredSet(
        HELD_OUT,
        "fifth round, one to four H100 or H200, predicted before measured",
        "nothing: the configurations were chosen on 2026-11-26 because none had been measured",
    ),
    "nemo-h100": MeasuredSet(
        BY_HASH,
        "public tables of NeMo and Megatron-Bridge on H100, fixed on 2026-11-26 before any row was scored",
        "the rise of the 340B float8 rows from 128 to 2,048 GPUs and a mean error of all came from others",
        share=0.4,
    ),
    "fsdp": MeasuredSet(
        BY_HASH,
        "published steps of fully sharded data parallelism, fixed on 2026-11-26 before any row was scored",
        "that such rows were priced 6 to 38% too fast came from others",
        share=0.4,
    ),
    "h100-own": MeasuredSet(DEVELOPMENT, "own runs on H100 before the fifth round", "all, 2026-11-26; not fitted"),
    "h100-peers": MeasuredSet(DEVELOPMENT, "Megatron-Core measured here on H100", "all, 2026-11-26; not fitted"),
    "vtrain-other": MeasuredSet(HELD_OUT, "vTrain's other multi-node rows, for others to check", "nothing"),
    "vtrain-single": MeasuredSet(
        HELD_OUT, "vTrain's single-node rows, for others to check", "a mean error of an earlier model, told by others"
    ),
    "korthikanti-2022": MeasuredSet(
        HELD_OUT, "Korthikanti et al. 2022, 22B to 1T, for others to check", "the paper is public; nothing scored"
    ),
}


def is_development(name: str, key: str) -> bool:
    """Return whether the row `key` of set `name` is a development row.

    By hash: the first eight hexadecimal digits of SHA-256 of "NAME KEY", as a fraction of 16^8, are below the set's
    share. `key` holds the row's configuration and nothing measured.
    """
    chosen = SETS[name]
    if chosen.side != BY_HASH:
        return chosen.side == DEVELOPMENT
    digest = hashlib.sha256(f"{name} {key}".encode()).hexdigest()
    return int(digest[:8], 16) / 16**8 < chosen.share
