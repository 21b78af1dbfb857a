"""Settings that a package owns: typed, shown, refused without their owner; and the optimizer of the documents."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from megascale.config import Config, from_tree
from megascale.config.plugin_settings import PLUGIN_SETTINGS, register_setting, remove_setting
from megascale.errors import ConfigError
from tests.conftest import lines
from tests.extend.packaged import install

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LION = "\n".join(CODE.findall((ROOT / "docs" / "extending-optimizer.md").read_text()))


@pytest.fixture
def setting():
    register_setting("optimizer.momentum", float, 0.5, "of the test", owner="optimizer.name=lamb", ge=0, lt=1)
    yield
    remove_setting("optimizer.momentum")
    assert "momentum" not in Config.model_fields["optimizer"].annotation.model_fields


@pytest.mark.usefixtures("setting")
def test_it_is_a_setting_like_others():
    assert from_tree({}).optimizer.momentum == 0.5
    config = from_tree({"optimizer": {"name": "lamb", "momentum": 0.75}})
    assert tomllib.loads(config.to_toml())["optimizer"]["momentum"] == 0.75
    with pytest.raises(ConfigError, match=r"optimizer\.momentum=1 is wrong: input should be less than 1"):
        from_tree({"optimizer": {"name": "lamb", "momentum": 1}})
    with pytest.raises(ConfigError, match=r"optimizer\.momentum=0\.75 has no effect without optimizer\.name=lamb; set"):
        from_tree({"optimizer": {"momentum": 0.75}})
    accepted = from_tree({"checkpoint": {"accept_changes": ["optimizer.momentum"]}})
    assert accepted.checkpoint.accept_changes == ["optimizer.momentum"]


def test_a_list_takes_a_single_value_as_built_in_lists_do():
    from_tree({"optimizer": {"name": "lamb"}})  # the section is known before it has the key
    register_setting("optimizer.factors", list[float], [], "of the test", owner="optimizer.name=lamb")
    try:
        assert from_tree({"optimizer": {"name": "lamb", "factors": 0.5}}).optimizer.factors == [0.5]
    finally:
        remove_setting("optimizer.factors")
    with pytest.raises(ConfigError, match=r"optimizer\.factors"):
        from_tree({"optimizer": {"name": "lamb", "factors": 0.5}})


@pytest.mark.parametrize(
    ("owner", "section", "key", "value"),
    [
        ("observe.span_sinks=kafka", "observe", "span_sinks", ["kafka=broker:9092/topic"]),
        ("observe.span_sinks=parquet", "observe", "span_sinks", ["parquet"]),
        ("kernels.deterministic=true", "kernels", "deterministic", True),
        ("parallel.zero=3", "parallel", "zero", 3),
    ],
)
def test_an_owner_with_an_argument_or_of_another_type_uses_its_setting(owner, section, key, value):
    register_setting("optimizer.momentum", float, 0.5, "of the test", owner=owner)
    try:
        tree = {"optimizer": {"momentum": 0.75}}
        assert from_tree({**tree, section: {key: value}}).optimizer.momentum == 0.75
        with pytest.raises(ConfigError, match=f"has no effect without {owner}"):
            from_tree(tree | {"observe": {"span_sinks": ["clickhouse=http://host"]}})
    finally:
        remove_setting("optimizer.momentum")


@pytest.mark.usefixtures("setting")
@pytest.mark.parametrize("key", ["optimizer.momentum", "optimizer.beta1", "optimiser.own", "optimizer.not a name"])
def test_a_key_is_registered_once_and_in_a_section(key):
    with pytest.raises(ConfigError, match=f"{key} cannot be registered"):
        register_setting(key, float, 0.5, "of the test", owner="optimizer.name=lamb")
    assert list(PLUGIN_SETTINGS) == ["optimizer.momentum"]


@pytest.mark.parametrize("owner", ["", "optimizer.name", "optimiser.name=lamb", "optimizer.nam=lamb", "lamb"])
def test_an_owner_that_names_no_setting_is_refused_at_once(owner):
    """Else only the first run that gives the key would fail, with an AttributeError."""
    with pytest.raises(ConfigError, match=r"optimizer\.momentum cannot be registered: owner="):
        register_setting("optimizer.momentum", float, 0.5, "of the test", owner=owner)
    assert PLUGIN_SETTINGS == {}


@pytest.mark.parametrize("default", [2.0, "half", None])
def test_a_default_that_its_own_limits_refuse_is_refused(default):
    """Else a run would save a value in config.toml that its resume refuses."""
    with pytest.raises(ConfigError, match=r"optimizer\.momentum cannot be registered: its default"):
        register_setting("optimizer.momentum", float, default, "of the test", owner="optimizer.name=lamb", lt=1)
    assert PLUGIN_SETTINGS == {}


def test_the_optimizer_of_the_documents_trains_and_resumes(megascale, tiny, tmp_path, monkeypatch):
    install(tmp_path / "site", "lions", LION, monkeypatch)
    options = ["--optimizer.name=lion", "--lr.peak=1e-3", "--train.name=lion"]

    described = megascale("config", "optimizer.lion_beta").stdout
    assert "0.9" in described
    assert "optimizer.name=lion" in " ".join(described.split())
    refused = megascale("train", tiny, "--optimizer.lion_beta=0.5")
    assert refused.returncode == 2
    assert "optimizer.lion_beta=0.5 has no effect without optimizer.name=lion" in " ".join(refused.stderr.split())

    first = megascale("train", tiny, *options, "--optimizer.lion_beta=0.8", "--train.steps=4")
    assert first.returncode == 0, first.stderr
    run = tmp_path / "runs" / "lion"
    assert tomllib.loads((run / "config.toml").read_text())["optimizer"]["lion_beta"] == 0.8
    changed = megascale("train", tiny, *options, "--optimizer.lion_beta=0.7")
    assert changed.returncode == 4
    assert "optimizer.lion_beta" in changed.stderr
    done = megascale("train", tiny, *options, "--optimizer.lion_beta=0.8")
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in lines(run / "metrics.jsonl") if "loss" in record]
    assert len(losses) == 8
    assert losses[-1] < losses[0]

    # Where the package is missing, the model can be read, and training is refused.
    monkeypatch.setenv("PYTHONPATH", "")
    evaluated = megascale("evaluate", run, "--device=cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    refused = megascale("train", tiny, *options, "--optimizer.lion_beta=0.8")
    assert refused.returncode == 2


def test_examples_import_only_promised_modules():
    """The table of docs/stability.md names what parts may import; examples and tests of parts keep to it."""
    page = (ROOT / "docs" / "stability.md").read_text()
    promised = set(re.findall(r"`(megascale[\w.]*)`", page)) | {"megascale.config.plugin_settings"}
    pages = ("extending.md", "extending-optimizer.md")
    sources = [code for name in pages for code in CODE.findall((ROOT / "docs" / name).read_text())]
    sources += [
        (ROOT / "tests" / "extend" / name).read_text() for name in ("parts.py", "latent_attention.py", "schedules.py")
    ]
    imported = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megascale"):
                imported.add(node.module)
    imported.discard("megascale.model")  # from megascale.model import attention
    assert imported <= promised, imported - promised
