"""Files of `src` that a part needs: one, in the package of its kind, under the part's own name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from megascale.config import from_tree
from megascale.config import parts as named_parts
from megascale.config.registry import Registry
from megascale.data.dataset.indexed import IndexedDataset
from megascale.errors import ConfigError
from megascale.resilience import cluster
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.local import LocalCluster
from tests.conftest import lines
from tests.forked import Forked

# Package -> module -> what it says; each is all that its part consists of.
FILES = {
    "model": {
        "doubled": """
from megascale.core.inventory import MLP_PARTS
from megascale.model import mlp


class DoubledMlp(mlp.DenseMlp):
    def forward(self, inner, projection):
        return super().forward(inner * 2, projection)


mlp.register("doubled", DoubledMlp, MLP_PARTS["dense"], "twice what goes in")
""",
        "largest": """
from megascale.model import norm


def largest(x, weight, bias, eps):
    return x / (x.abs().amax(-1, keepdim=True) + eps) * weight


norm.register("largest", norm.NormOperators(largest), bias=False)
""",
        "halved": """
from dataclasses import replace

from megascale.core.inventory import ATTENTION_PARTS
from megascale.model import attention


class HalvedAttention(attention.CausalAttention):
    def attend(self, q, k, v, rotary, context):
        return super().attend(q / 2, k, v, rotary, context)


inventory = replace(ATTENTION_PARTS["causal"], splits_fused_projection=False)
attention.register("halved", HalvedAttention, inventory, "colder")
""",
        "once": """
from megascale.core.inventory import BLOCK_PARTS
from megascale.model import block


class Once(block.SerialBlock):
    def forward(self, x, rotary, context, defer_add=False):
        return super().forward(x, None, context, defer_add)


block.register("once", Once, BLOCK_PARTS["serial"], "without rotary positions")
""",
    },
    "ops": {
        "cubed": """
from megascale.ops import activation

activation.register("cubed", activation.Activation(lambda x: x**3, "cubed"))
"""
    },
    "optim": {
        "descent": """
from megascale.config.parts import OptimizerFacts
from megascale.optim.base import UpdateRule
from megascale.optim.rules import register


class Descent(UpdateRule):
    def update(self, step, updated):
        for s in self.shards.update_order:
            s.master.sub_(step.learning_rate * s.shard.grads)
            if s.param_out is not None:
                s.param_out.copy_(s.master)
            updated(s.shard)


register("descent", OptimizerFacts(lambda name, shape: ()), Descent)
"""
    },
    "core": {
        "plain_order": """
from megascale.core.schedule import build_1f1b
from megascale.core.schedule_registry import SCHEDULES, ScheduleDefinition


def plain_order(stages, virtual, microbatches, reduce_each, micro_batch_group_size):
    return build_1f1b(stages, microbatches, reduce_each)


SCHEDULES.register("plain_order", ScheduleDefinition(plain_order))
"""
    },
    "parallel": {
        "halves": """
import torch

from megascale.parallel import linear
from megascale.parallel.linear_precision import LinearPrecision


class Halves(LinearPrecision):
    def prepare_input(self, x, weight, amax=None, for_gather=False):
        return super().prepare_input(x.to(torch.bfloat16).to(x.dtype), weight, amax, for_gather)


linear.register("halves", Halves, "activations rounded to half their bits")
"""
    },
    "observe": {
        "counting": """
from megascale.observe import metrics


class Counting:
    def __init__(self, at):
        self.file, self.count = at.run / "count", 0

    def write(self, record):
        self.count += 1

    def close(self):
        self.file.write_text(str(self.count))


metrics.register("counting", Counting)
"""
    },
    "data.dataset": {
        "raw16": """
from pathlib import Path

import numpy as np

from megascale.data.dataset.formats import FORMATS
from megascale.data.dataset.token_file import TokenFile


class Raw(TokenFile):
    def __init__(self, entry):
        self.prefix, self._tokens = str(entry), np.memmap(entry, "<u2", "r")
        self.tokens = len(self._tokens)

    @property
    def stream(self):
        return self._tokens

    @classmethod
    def files(cls, entry):
        return [Path(entry)]


FORMATS.register("raw16", Raw)
"""
    },
    "checkpoint.storage": {
        "beside": """
from pathlib import Path

from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.checkpoint.storage.opening import STORAGES


class Beside(LocalStorage):
    def __init__(self, url):
        super().__init__(Path(url.partition("://")[2] + ".beside"))
        self.url = url


STORAGES.register("beside", Beside)
"""
    },
}
ROTARY = "--model.positions=rotary"
BUILD = """
import importlib
for name, folder in {folders!r}.items():
    importlib.import_module("megascale." + name).__path__.append(folder)
"""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """The files, in folders that lie where those of the packages do."""
    for package, files in FILES.items():
        for name, text in files.items():
            file = tmp_path / "src" / package / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return {package: str(tmp_path / "src" / package) for package in FILES}


def test_a_part_of_each_kind_is_one_file_and_trains(folders, tiny, tokens, tmp_path):
    raw = tmp_path / "train.raw16"
    IndexedDataset(tokens / "train").stream.astype("<u2").tofile(raw)
    parts = {
        "mlp": "--model.mlp=doubled",
        "attention": "--model.attention=halved",
        "norm": "--model.norm=largest",
        "block": "--model.block=once",
        "activation": "--model.activation=cubed",
        "optimizer": "--optimizer.name=descent",
        "precision": "--train.linear_precision=halves",
    }
    around = [
        "--parallel.schedule=plain_order",
        "--observe.sinks=counting",
        f"--data.train={raw}",
        f"--checkpoint.location=beside://{tmp_path}/saved",
    ]
    before = BUILD.format(folders=folders)

    def losses(name: str, *arguments: str) -> list[float]:
        process = Forked(["train", tiny, f"--train.name={name}", ROTARY] + list(arguments), before=before, cwd=tmp_path)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return [record["loss"] for record in lines(tmp_path / "runs" / name / "metrics.jsonl") if "loss" in record]

    result, run = losses("all", *parts.values(), *around), tmp_path / "runs" / "all"
    assert len(result) == 8
    assert result[-1] < result[0]
    assert int((run / "count").read_text()) == len(lines(run / "metrics.jsonl"))
    assert any((tmp_path / "saved.beside").glob("step-*/COMMIT"))
    active = next(event for event in lines(run / "events.jsonl") if event["event"] == "active")
    assert active["linear layers"] == "halves"
    # Tokens, their order and the schedule are the same in ours; each of the other parts makes a difference.
    assert losses("ours-around", *parts.values(), "--train.stop_after=2") == result[:2]
    for left_out in parts:
        sample = [word for part, word in parts.items() if part != left_out]
        assert losses(f"without-{left_out}", *sample, "--train.stop_after=2")[1] != result[1]


RULE = """
from megascale.resilience.rules.table import quick_rule


@quick_rule
def never(view):
    return []
"""
WITH_A_FILE_MORE = """
import sys
from importlib.util import find_spec, module_from_spec

spec = find_spec("megascale.resilience.rules")
spec.submodule_search_locations.append(sys.argv[1])
sys.modules[spec.name] = rules = module_from_spec(spec)
spec.loader.exec_module(rules)
print([rule.__name__ for rule in rules.QUICK_RULES])
"""


def test_a_rule_is_one_file(tmp_path):
    (tmp_path / "no_rule_yet.py").write_text(RULE)
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_FILE_MORE, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("'never']\n")


CLUSTER = """
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.local import LocalCluster


class Elsewhere(LocalCluster):
    pass


CLUSTERS.register("elsewhere", Elsewhere)
"""


def test_a_cluster_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(CLUSTER)
    monkeypatch.setattr(cluster, "__path__", cluster.__path__ + [str(tmp_path)])
    try:
        assert "elsewhere" in CLUSTERS
        assert isinstance(CLUSTERS["elsewhere"](ClusterRequest(tmp_path, from_tree({}))), LocalCluster)
    finally:
        sys.modules.pop(f"{cluster.__name__}.elsewhere", None)
        CLUSTERS.remove("elsewhere")


def test_a_name_without_a_module_imports_none():
    before = set(sys.modules)
    for key, name in (("mlp", "no_such_part"), ("mlp", "os.path"), ("mlp", "../mlp"), ("norm", "")):
        with pytest.raises(ConfigError, match=rf"model\.{key}='?{name}"):
            from_tree({"model": {key: name, "vocab_size": 50}})
    assert not {name for name in set(sys.modules) - before if name.startswith("megascale.model")}


def test_a_module_of_ours_that_registers_nothing_is_no_part():
    import_module("megascale.model.transformer")
    with pytest.raises(ConfigError, match=r"model\.mlp='transformer' is not known; choose among 'dense'"):
        from_tree({"model": {"mlp": "transformer", "vocab_size": 50}})


def test_every_registry_of_a_setting_has_a_package_for_its_parts():
    homes = {name: registry._home for name, registry in vars(named_parts).items() if isinstance(registry, Registry)}
    assert all(homes.values())
    for home in homes.values():
        assert import_module(home).__path__
