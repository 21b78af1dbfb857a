"""Configurations of the differential suite: the known-hard ones by name, and a strategy for all others.

A case is a nested dictionary as a TOML file gives it, and the number of processes it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import strategies as st

PROCESSES = 8
SMALL: dict[str, Any] = {
    "model": {
        "layers": 4,
        "hidden": 16,
        "heads": 4,
        "sequence_length": 8,
        "vocab_size": 21,
        "vocab_multiple": 8,
        # Wide enough that softmax and norms are far from linear.
        "init_std": 0.2,
    },
    "optimizer": {"clip": 0.3},
    # The rate must not have fallen to zero by the last step, or what that step does to the weights goes unseen.
    "lr": {"peak": 1e-2, "warmup_steps": 2, "decay_steps": 6},
    "train": {"micro_batch": 1, "precision": "float64"},
}


@dataclass(frozen=True)
class Case:
    """A configuration and its world."""

    tree: dict[str, Any]
    world: int

    @property
    def twin(self) -> dict[str, Any]:
        """The same training on one process, all samples of a step at once."""
        full = {**self.tree["train"], "micro_batch": self.tree["train"]["global_batch"]}
        return {**self.tree, "parallel": {}, "overlap": {}, "train": full}


def case(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    *,
    microbatches: int,
    virtual: int = 1,
    zero: int = 1,
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    overlap: dict[str, Any] | None = None,
) -> Case:
    """Return a case whose data-parallel ranks run `microbatches` in a step.

    Without `layers` a model has one layer per chunk, and at least two. A split or a pattern of layers keeps the four of
    SMALL.
    """
    layers = SMALL["model"]["layers"]
    if "layer_split" not in (parallel or {}) and "layer_pattern" not in (model or {}):
        layers = max(2, pipeline * virtual)
    tree = {
        **SMALL,
        "model": {**SMALL["model"], "layers": layers, **(model or {})},
        "optimizer": {**SMALL["optimizer"], **(optimizer or {})},
        "train": {**SMALL["train"], **(train or {})},
        "overlap": overlap or {},
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "virtual_stages": virtual,
            "zero": zero,
            **(parallel or {}),
        },
    }
    tree["train"]["global_batch"] = tree["train"]["micro_batch"] * data * microbatches
    return Case(tree, tensor * pipeline * data * tree["parallel"].get("context", 1))


# For what does not depend on how many there are: a stage's or a chunk's layers meet in other cases.
TWO_LAYERS = {"layers": 2}
# Layers that differ in window, positions, groups and width.
KINDS: dict[str, Any] = {
    "positions": "rotary",
    "layer_pattern": "SGN",
    "layer_kinds": {
        "G": {"positions": "rotary", "rotary_base": 50.0, "rotary_fraction": 0.5, "head_dim": 8, "ffn_hidden": 32},
        "N": {"positions": "none", "window": 3, "kv_heads": 4, "qk_norm": "head"},
    },
}

# OLMo 2's norms, which tensor-parallel ranks compute together.
POST_NORMS: dict[str, Any] = {"norm": "rmsnorm", "norm_placement": "post", "qk_norm": "projection", "kv_heads": 2}
YARN = {"method": "yarn", "factor": 4.0, "original_length": 4}
LLAMA3 = {
    "method": "llama3",
    "factor": 4.0,
    "original_length": 8,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
}

HARD = {
    # Padding: 17 tokens in 32 rows over 4 ranks leave one row to the third and none to the fourth.
    "vocabulary not divisible, a rank of padding only": case(
        4, 1, 2, microbatches=2, model={"layers": 1, "vocab_size": 17, "vocab_multiple": 16, "head_bias": True}
    ),
    "vocabulary not divisible, tied over stages": case(
        2, 2, 2, microbatches=3, zero=2, model={"layers": 2, "vocab_size": 19, "vocab_multiple": 16}
    ),
    "ZeRO-2, tables divided by rows": case(
        1,
        1,
        4,
        microbatches=2,
        zero=2,
        model={"layers": 2, "vocab_size": 450, "tied_embeddings": False},
        parallel={"bucket_elements": 700},
        optimizer={"name": "lamb"},
    ),
    "ZeRO-2, tables of two stages divided by rows, nothing overlapped": case(
        2,
        2,
        2,
        microbatches=3,
        zero=2,
        model={"layers": 2, "vocab_size": 450, "tied_embeddings": False, "head_bias": True},
        parallel={"bucket_elements": 700, "reduce_dtype": "float32"},
        overlap={"data": False},
    ),
    # Rounds of interleaved 1F1B of unequal size, and larger than the pipeline.
    "uneven rounds, 2 stages of 3": case(1, 2, 2, virtual=3, microbatches=5, model={"layers": 6}),
    "uneven rounds, 4 stages of 2": case(1, 4, 2, virtual=2, microbatches=7, zero=2, model={"layers": 9}),
    "uneven rounds, 4 stages of 3, one layer each": case(
        2, 4, 1, virtual=3, microbatches=5, model={"layers": 12, "block": "parallel"}
    ),
    "one round of all micro-batches": case(
        1, 2, 2, virtual=3, microbatches=5, model={"layers": 6}, parallel={"micro_batch_group_size": 5}
    ),
    "rounds longer than the pipeline, transfers exposed": case(
        1, 2, 2, virtual=2, microbatches=7, zero=2, parallel={"micro_batch_group_size": 3}, overlap={"pipeline": False}
    ),
    "three chunks on one stage, one round": case(
        2,
        1,
        2,
        virtual=3,
        microbatches=3,
        model={"layers": 5},
        parallel={"micro_batch_group_size": 3, "bucket_elements": 700},
    ),
    "two chunks on one stage, two rounds, untied": case(
        1,
        1,
        2,
        virtual=2,
        microbatches=5,
        zero=0,
        model={"tied_embeddings": False},
        parallel={"micro_batch_group_size": 2},
    ),
    "uneven rounds, transfers exposed": case(
        1, 2, 2, virtual=2, microbatches=5, model={"layers": 5}, overlap={"pipeline": False}
    ),
    "nothing overlapped": case(
        2, 2, 2, microbatches=3, model=TWO_LAYERS, overlap={"tensor": "off", "pipeline": False, "data": False}
    ),
    "fewer micro-batches than stages": case(1, 4, 2, microbatches=2, zero=2),
    "fewer micro-batches than stages, interleaved": case(1, 4, 2, virtual=2, microbatches=3, model={"layers": 8}),
    "one micro-batch": case(2, 2, 2, virtual=2, microbatches=1, zero=1),
    "one layer a stage": case(2, 4, 1, microbatches=4, model={"tied_embeddings": False}),
    "uneven split of layers": case(
        2, 2, 2, virtual=2, microbatches=2, model={"layers": 7}, parallel={"layer_split": [1, 3, 1, 2]}
    ),
    "layers divided between chunks": case(
        2,
        2,
        2,
        virtual=2,
        microbatches=3,
        zero=2,
        model={"layers": 3, "dropout": 0.1},
        parallel={"layer_split": [0.5, 1, 1, 0.5], "bucket_elements": 700},
    ),
    "layers divided between chunks, recomputed": case(
        1,
        4,
        1,
        microbatches=4,
        model={"layers": 4},
        parallel={"layer_split": [1.5, 0.5, 1.5, 0.5], "recompute": "full"},
    ),
    "embedding and logits in chunks of their own": case(
        1, 2, 2, virtual=2, microbatches=4, zero=2, parallel={"layer_split": [0, 2, 2, 0]}
    ),
    **{
        f"tied over stages, ZeRO-{zero}, {name}": case(
            1,
            2,
            2,
            microbatches=3,
            zero=zero,
            model=TWO_LAYERS,
            parallel={"bucket_elements": 700},
            optimizer={"name": name},
        )
        for zero in (0, 1, 2)
        for name in ("adamw", "lamb")
    },
    **{
        f"many small buckets, ZeRO-{zero}": case(
            2,
            2,
            2,
            virtual=2,
            microbatches=2,
            zero=zero,
            parallel={"bucket_elements": 130, "recompute": recompute},
            model={"layers": 5, "block": "parallel", "dropout": 0.1, "window": 3, "kv_heads": 2},
            optimizer={"name": "lamb"},
            train={"micro_batch": 2},
        )
        for zero, recompute in ((0, "none"), (1, "selective"), (2, "full"))
    },
    "clipping counts every parameter once": case(
        2, 2, 2, microbatches=2, zero=0, model=TWO_LAYERS, optimizer={"clip": 1e-3}
    ),
    "no clipping, no decay, no bias correction": case(
        2,
        2,
        2,
        microbatches=2,
        zero=2,
        model=TWO_LAYERS,
        optimizer={
            "name": "lamb",
            "clip": 0.0,
            "weight_decay": 0.0,
            "lamb_bias_correction": False,
            "trust_min": 0.5,
            "trust_max": 2.0,
        },
    ),
    "bias on one half of a parallel block": case(
        2,
        1,
        2,
        microbatches=2,
        zero=2,
        model={**TWO_LAYERS, "block": "parallel", "attention_bias": False, "positions": "rotary"},
    ),
    "parallel block with two norms": case(
        2, 2, 1, microbatches=3, model={"block": "parallel", "parallel_norms": 2, "norm": "rmsnorm"}
    ),
    "one key/value head a rank, part of a head rotary": case(
        2,
        1,
        2,
        microbatches=1,
        model={
            **TWO_LAYERS,
            "kv_heads": 2,
            "positions": "rotary",
            "rotary_fraction": 0.5,
            "activation": "swiglu",
            "window": 2,
        },
    ),
    "kinds of layers": case(
        2, 2, 1, microbatches=3, model={**KINDS, "layers": 4, "norm": "rmsnorm", "activation": "swiglu"}
    ),
    "norms on sums and over projections": case(
        2, 2, 2, microbatches=2, model={**POST_NORMS, "rotary_scaling": YARN, "positions": "rotary", "layers": 3}
    ),
    "norms on sums, halves of layers, dropout": case(
        2,
        2,
        1,
        microbatches=3,
        virtual=2,
        model={**POST_NORMS, "norm_placement": "both", "dropout": 0.2},
        parallel={"layer_split": [0.5, 1.5, 1.5, 0.5]},
    ),
    "scaled positions in one kind of layer, gathers exposed": case(
        2,
        1,
        2,
        microbatches=2,
        zero=2,
        model={"positions": "rotary", "layer_pattern": "SY", "layer_kinds": {"Y": {"rotary_scaling": LLAMA3}}},
        overlap={"tensor": "off"},
    ),
    "kinds of parallel layers": case(
        2, 1, 2, microbatches=2, zero=2, model={**KINDS, "block": "parallel", "layers": 3}, optimizer={"name": "muon"}
    ),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layout within PROCESSES processes, of any model, optimizer and amount of work."""
    pick = lambda *values: draw(st.sampled_from(values))
    sizes = (1, 2, 4)
    layouts = [
        (t, p, d, c)
        for t, p, d, c in product(sizes, sizes, sizes, sizes[:2])
        if 1 < t * p * d * c <= PROCESSES and t * c <= 4
    ]
    tensor, pipeline, data, context = draw(st.sampled_from(layouts))
    virtual = pick(1, 2, 3)
    chunks = pipeline * virtual
    layers = draw(st.integers(max(1, chunks), max(2, chunks + 2)))
    positions = pick("learned", "rotary", "none")
    model = {
        "layers": layers,
        "block": pick("serial", "parallel"),
        "parallel_norms": pick(1, 2),
        "norm": pick("layernorm", "rmsnorm", "layernorm_no_bias", "rmsnorm_zero_centred"),
        "activation": pick("gelu", "gelu_tanh", "swiglu", "geglu_tanh"),
        "residual_multiplier": pick(1.0, 0.5),
        "attention_multiplier": pick(None, 0.7),
        "attention_softcap": pick(None, 1.5),
        "logit_softcap": pick(None, 2.0),
        "kv_heads": draw(st.sampled_from([k for k in (1, 2, 4) if k % tensor == 0])),
        "head_dim": pick(4, 6),
        "ffn_hidden": pick(64, 20),
        "sequence_length": pick(8, 12),
        "positions": positions,
        "rotary_fraction": pick(1.0, 0.5) if positions == "rotary" else 1.0,
        "rotary_interleaved": pick(False, True),
        "attention_bias": pick(True, False),
        "qk_norm": pick("none", "head"),
        "mlp_bias": pick(True, False),
        "head_bias": pick(False, True),
        "tied_embeddings": pick(True, False),
        "window": pick(None, 3),
        "dropout": pick(0.0, 0.2),
        "vocab_size": pick(21, 32),
    }
    if not model["head_bias"]:
        model["logit_multiplier"] = pick(1.0, 0.3)
    if positions != "learned":
        model["embedding_multiplier"] = pick(1.0, 3.0)
    if model["norm"] == "rmsnorm":
        model["qk_norm"] = pick("none", "head", "projection")
    if model["block"] == "serial":
        model["norm_placement"] = pick("pre", "post", "both")
    if positions == "rotary":
        model["rotary_scaling"] = pick(None, YARN, LLAMA3)
    if positions == "learned":
        model["layer_pattern"] = pick("S", "SL")
    else:
        model |= pick({"layer_pattern": "S"}, {"layer_pattern": "SL"}, {**KINDS, "positions": positions})
    if model["head_dim"] * model["rotary_fraction"] % 2:
        model["head_dim"] = 4
    halves = ("mlp", "attention") if model["block"] == "serial" else ()
    split = None
    if chunks > 1 and draw(st.booleans()):
        # Only the first and the last chunk may be without layers.
        inner = [1] * (chunks - 2)
        cuts = sorted(draw(st.lists(st.integers(0, layers - len(inner)), min_size=chunks - 1, max_size=chunks - 1)))
        spare = [b - a for a, b in zip([0] + cuts, cuts + [layers - len(inner)], strict=True)]
        split = [a + b for a, b in zip(spare, [0] + inner + [0], strict=True)]
        if model["block"] == "serial" and draw(st.booleans()):
            for at in range(1, chunks):
                if split[at] >= 1:
                    split[at], split[at - 1] = split[at] - 0.5, split[at - 1] + 0.5
    return case(
        tensor,
        pipeline,
        data,
        virtual=virtual,
        microbatches=draw(st.integers(1, 7 if pipeline > 1 else 3)),
        zero=pick(0, 1, 3) if virtual > pipeline == 1 else pick(0, 1, 2, 3),
        parallel={
            "context": context,
            "layer_split": split,
            "micro_batch_group_size": None
            if virtual == 1
            else pick(*([None] if pipeline > 1 else []), pipeline + 1, 7),
            "bucket_elements": pick(40_000_000, 900),
            "recompute": pick("none", "norms", "activation", "selective", "full", *halves),
        },
        model=model,
        optimizer={"name": pick("adamw", "lamb", "muon"), "clip": pick(0.3, 0.0)},
        train={"micro_batch": pick(1, 2), "seed": pick(1, 2)},
        overlap={"tensor": pick("auto", "async", "off"), "data": pick(True, False), "pipeline": pick(True, False)},
    )
