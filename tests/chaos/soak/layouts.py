"""`python -m tests.chaos soak --parts layouts`: random tiny models in random layouts train as one process does.

A case draws a model (block, norms, activation, positions, heads, window, tied embeddings, dropout), an optimizer, a
layout of two to four processes (tensor, pipeline, virtual stages, data, ZeRO, rounds, split of layers, recompute) and
trains a few steps in float64 on gloo; the same training on one process is what it must equal. Processes are forked
from a server that has imported the engine, so a case takes about a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.soak.command import Report, SoakCase

if TYPE_CHECKING:
    import numpy as np

    from megascale.config import Config

TOLERANCE = 1e-10  # relative, of losses, gradient norms and each tensor's 2-norm
STEPS = 3
PROCESSES = 4
GRACE_PERIOD = 120.0  # seconds for a run of a second; the machine may be busy

Tree = dict[str, dict[str, Any]]
# One rank's tale: losses, gradient norms, and boxes (name, whole shape, offsets, values) of the final state.
Tale = tuple[list[float], list[float], list[tuple[str, tuple[int, ...], tuple[int, ...], "np.ndarray"]]]


def run(cases: range, seed: int, folder: Path, report: Report) -> None:
    """Train random cases, those of these numbers; a case holds if everything is within TOLERANCE of one process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "megascale.train.engine"])
    for number in cases:
        tree, world = draw(random.Random(f"{seed} {number}"))
        location = folder / str(number)
        location.mkdir(parents=True)
        (location / "case.json").write_text(json.dumps({"world": world, **tree}, indent=1))
        try:
            [expected] = _train(context, one_process(tree), 1, location / "one")
            messages = _train(context, tree, world, location / "many")
            name, worst = max(differences(_config(tree), expected, messages).items(), key=lambda item: item[1])
            stored, outcome = worst <= TOLERANCE, f"largest relative difference {worst:.1e} ({name})"
        except Exception as error:
            stored, outcome = False, f"{type(error).__name__}: {error}"
        report(SoakCase(f"seed {seed}, case {number}: {describe(tree, world)}", stored, outcome))


def draw(chance: random.Random) -> tuple[Tree, int]:
    """A random case: settings as a TOML file gives them, and its number of processes."""
    pick = chance.choice
    sizes = (1, 2, 4)
    tensor, pipeline, data = pick(
        [(t, p, d) for t in sizes for p in (1, 2, 3, 4) for d in (1, 2, 3, 4) if 1 < t * p * d <= PROCESSES]
    )
    virtual = pick((1, 2, 3)) if pipeline > 1 else pick((1, 1, 2))
    chunks = pipeline * virtual
    layers = chance.randint(chunks, chunks + 2)
    positions = pick(("learned", "rotary", "none"))
    model = {
        "layers": layers,
        "hidden": 16,
        "heads": 4,
        "kv_heads": pick([k for k in (1, 2, 4) if k % tensor == 0]),
        "head_dim": pick((4, 8)),
        "ffn_hidden": pick((64, 20)),
        "sequence_length": pick((8, 12, 16)),
        "vocab_size": pick((17, 21, 32)),
        "vocab_multiple": 8,
        "block": pick(("serial", "parallel")),
        "parallel_norms": pick((1, 2)),
        "norm": pick(("layernorm", "rmsnorm")),
        "activation": pick(("gelu", "gelu_tanh", "swiglu")),
        "positions": positions,
        "rotary_fraction": pick((1.0, 0.5)) if positions == "rotary" else 1.0,
        "rotary_interleaved": pick((True, False)),
        "attention_bias": pick((True, False)),
        "mlp_bias": pick((True, False)),
        "head_bias": pick((True, False)),
        "tied_embeddings": pick((True, False)),
        "layer_pattern": pick(("S", "SL")),
        "dropout": pick((0.0, 0.2)),
        "init_std": 0.2,  # wide enough that softmax and norms are far from linear
    }
    # A window of one token leaves queries and keys without a gradient: only rounding would be compared.
    window = pick((None, 2, 3, 100))
    if window:
        model["window"] = window
    # Several chunks on one stage are for long rounds, which ZeRO-2 does not go with.
    zero = pick((0, 1, 2, 3)) if pipeline > 1 or virtual == 1 else pick((0, 1, 3))
    microbatches, micro_batch = chance.randint(1, 5), pick((1, 2))
    parallel: dict[str, Any] = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "virtual_stages": virtual,
        "zero": zero,
        "recompute": pick(("none", "norms", "activation", "selective", "full")),
        "bucket_elements": pick((130, 700, 40_000_000)),
    }
    if virtual > 1 and (pipeline == 1 or pick((True, False))):
        parallel["micro_batch_group_size"] = chance.randint(pipeline, pipeline + 3)
    if chunks > 1 and pick((True, False)):
        parallel["layer_split"] = _split(chance, layers, chunks, model["block"] == "serial")
    optimizer = {
        "name": pick(("adamw", "lamb", "muon")),
        "clip": pick((0.0, 1e-3, 0.3)),
        "weight_decay": pick((0.0, 0.1)),
    }
    train: dict[str, Any] = {"precision": "float64", "device": "cpu", "threads": 1, "seed": chance.randint(0, 9999)}
    train |= {"micro_batch": micro_batch, "global_batch": micro_batch * data * microbatches}
    overlap = {"tensor": pick(("auto", "async", "off")), "pipeline": pick((True, False)), "data": pick((True, False))}
    lr = {"peak": 1e-2, "warmup_steps": 2}
    sections: Tree = {"model": model, "optimizer": optimizer, "lr": lr, "parallel": parallel}
    return {**sections, "overlap": overlap, "train": train}, tensor * pipeline * data


def _split(chance: random.Random, layers: int, chunks: int, divides: bool) -> list[float]:
    """Layers of each chunk, perhaps with halves of one; only the first and the last may be without any."""
    size: float = 0.5 if divides and chance.random() < 0.5 else 1
    split: list[float] = [0.0] + [1.0] * (chunks - 2) + [0.0]
    for _ in range(int((layers - sum(split)) / size)):
        split[chance.randrange(chunks)] += size
    return split


def one_process(tree: Tree) -> Tree:
    """The same training on one process, all samples of a step at once."""
    full = tree["train"] | {"micro_batch": tree["train"]["global_batch"]}
    return {**tree, "parallel": {}, "overlap": {}, "train": full}


def describe(tree: Tree, world: int) -> str:
    """A case in a few words; its folder has all of it."""
    model = tree["model"]
    parallel = tree["parallel"]
    train = tree["train"]
    arguments = [f"{world} processes TP{parallel['tensor']} PP{parallel['pipeline']}x{parallel['virtual_stages']}"]
    arguments += [f"DP{parallel['data']} ZeRO-{parallel['zero']}, recompute {parallel['recompute']}"]
    arguments += [f"{model['layers']} layers {model['block']} {model['norm']} {model['positions']}"]
    arguments += [f"window {model['window']}"] if "window" in model else []
    arguments += ["tied"] if model["tied_embeddings"] else []
    arguments += [tree["optimizer"]["name"], f"batch {train['global_batch']} of {train['micro_batch']}"]
    return ", ".join(arguments)


def _config(tree: Tree) -> Config:
    from megascale.config import from_tree

    return from_tree(tree)


# processes ----------------------------------------------------------------------------------------------------------


def _train(context: Any, tree: Tree, world: int, folder: Path) -> list[Tale]:
    """Return each rank's result. Raise RuntimeError with the ranks' messages if one fails or takes too long."""
    folder.mkdir()
    ranks = [context.Process(target=_rank, args=(rank, world, tree, folder), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + GRACE_PERIOD
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            if any(p.exitcode for p in ranks):
                deadline = min(deadline, time.monotonic() + 2.0)  # the others may still say what they saw
            next((p for p in ranks if p.is_alive()), ranks[0]).join(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    tales = []
    for rank, process in enumerate(ranks):
        file = folder / f"rank-{rank}.json"
        if process.exitcode or not file.exists():
            output = folder / f"rank-{rank}.error"
            arguments = (
                output.read_text().strip().splitlines()[-1] if output.exists() else f"no answer in {GRACE_PERIOD:g} s"
            )
            raise RuntimeError(f"rank {rank} of {world}: {arguments}")
        tales.append(_read(file))
    return tales


def _rank(rank: int, world: int, tree: Tree, folder: Path) -> None:
    try:
        _write(folder / f"rank-{rank}.json", _train_rank(rank, world, tree, folder))
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # gloo's threads need no farewell


def _write(file: Path, tale: Tale) -> None:
    import numpy as np

    losses, norms, state = tale
    values: dict[str, Any] = {str(i): box[3] for i, box in enumerate(state)}
    np.savez(file.with_suffix(".npz"), **values)
    file.write_text(json.dumps([losses, norms, [box[:3] for box in state]]))


def _read(file: Path) -> Tale:
    import numpy as np

    losses, norms, boxes = json.loads(file.read_text())
    with np.load(file.with_suffix(".npz")) as values:
        return (
            losses,
            norms,
            [(name, tuple(shape), tuple(at), values[str(i)]) for i, (name, shape, at) in enumerate(boxes)],
        )


def _train_rank(rank: int, world: int, tree: Tree, folder: Path) -> Tale:
    """Train as one rank."""
    import torch
    import torch.distributed as dist

    from megascale.core.layout import lay_out
    from megascale.optim.learning_rate import compute_learning_rate
    from megascale.rendezvous.groups import make_groups
    from megascale.train.engine import Engine

    torch.set_num_threads(1)
    config, groups = _config(tree), None
    layout = lay_out(config, world)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=GRACE_PERIOD)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        tied = config.model.tied_embeddings
        groups = make_groups(layout.grid, rank, chunk_map=layout.chunk_map, tied=tied, timeout=limit)
    engine = Engine(layout, groups, torch.device("cpu"))
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        engine.start_gather()
        rate = compute_learning_rate(config.lr, step, STEPS)
        result = engine.step(_batches(config, engine, step), step, rate, has_next_step=step < STEPS)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    engine.synchronize()
    state = [(name, shape, at, view.numpy().copy()) for name, shape, at, view in engine.optimizer.logical_tensors()]
    if world > 1:
        dist.barrier()
    return losses, norms, state


def _batches(config: Config, engine: Any, step: int) -> Callable[[int], Any]:
    """This rank's micro-batches of a step, of tokens that depend on step and sample alone."""
    import numpy as np
    import torch

    from megascale.core.batch import Batch

    train, model = config.train, config.model
    share = train.global_batch // engine.layout.grid.data

    def batch(i: int) -> Any:
        first = engine.data_rank * share + i * train.micro_batch
        rows = [
            np.random.default_rng((train.seed, step, first + k)).integers(0, model.vocab, model.sequence_length + 1)
            for k in range(train.micro_batch)
        ]
        columns = torch.from_numpy(np.stack(rows)).t().contiguous()
        return Batch(columns[:-1], columns[1:])

    return batch


# comparing ----------------------------------------------------------------------------------------------------------


def differences(config: Config, expected: Tale, report: list[Tale]) -> dict[str, float]:
    """Relative differences by name: losses and norms of each step on each rank, 2-norms of weights and moments.

    Every copy of a tensor counts. ValueError if an element is on no rank, or a tensor is not the reference's.
    """
    import numpy as np

    result: dict[str, float] = {}
    for rank, (losses, norms, _) in enumerate(report):
        for subject, local, should in (("loss", losses, expected[0]), ("gradient norm", norms, expected[1])):
            for step, (value, right) in enumerate(zip(local, should, strict=True), start=1):
                separate = abs(value - right) / abs(right)
                result[f"{subject} of step {step} on rank {rank}"] = separate if separate == separate else float("inf")
    full: dict[str, np.ndarray] = {}
    for name, shape, at, values in expected[2]:
        full.setdefault(name, np.full(shape, np.nan))[_where(at, values)] = values
    observed = {name: np.zeros(tensor.shape, bool) for name, tensor in full.items()}
    squares = dict.fromkeys(full, 0.0)
    for _, _, state in report:
        for name, shape, at, values in state:
            if name not in full or full[name].shape != tuple(shape):
                raise ValueError(f"{name} of shape {shape} is not a tensor of the one process")
            where = _where(at, values)
            counted = ~_nothing(config, name, shape)[where]
            squares[name] += float(np.square((values - full[name][where])[counted]).sum())
            observed[name][where] = True
    for name, tensor in full.items():
        if not observed[name].all():
            raise ValueError(f"{name}: {int((~observed[name]).sum())} elements are on no rank")
        scale = float(np.linalg.norm(tensor[~_nothing(config, name, tensor.shape)]))
        separate = squares[name] ** 0.5 / scale if scale else squares[name] ** 0.5
        result[name] = separate if separate == separate else float("inf")
    return result


def _where(at: tuple[int, ...], values: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(at, values.shape, strict=True))


def _nothing(config: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements whose gradient is zero by mathematics, so that only rounding is left of it: the bias of keys adds the
    same to all scores of a query, which softmax does not see, where no rotary position turns it."""
    import numpy as np

    model = config.model
    if not name.endswith("attention.key.bias"):
        return np.zeros(shape, bool)
    turned = int(model.head_size * model.rotary_fraction) if model.positions == "rotary" else 0
    return np.tile(np.arange(model.head_size) >= turned, model.num_kv_heads)
