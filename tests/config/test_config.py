"""The configuration tree: overrides, messages, round trip, and that no input breaks it in an unplanned way."""

from __future__ import annotations

import re
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.core.layout import lay_out
from megascale.errors import ConfigError, FitError, MegascaleError


def test_override_beats_file_beats_preset(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[model]\npreset = "gpt2-124m"\nlayers = 3\n[train]\nsteps = 5\n')
    result = config.load(file, ["--train.steps=7", "--model.heads=6", "--data.train=a,b", "--train.name=12"])
    assert (result.model.layers, result.model.hidden, result.model.heads) == (3, 768, 6)
    assert (result.train.steps, result.data.train, result.train.name) == (7, ["a", "b"], "12")


def test_one_key_of_a_table_leaves_the_others_of_the_preset(tmp_path):
    overrides = ["--model.preset=qwen3-30b-a3b", "--model.experts.sequence_loss=0.001"]
    experts = config.load(overrides=overrides).model.experts
    assert (experts.number, experts.top_k, experts.width) == (128, 8, 768)
    assert experts.sequence_loss == 0.001
    file = tmp_path / "tables.toml"
    file.write_text('[model]\npreset = "gpt-oss-20b"\n[model.experts]\nbias_rate = 0.01\n')
    model = config.load(file).model
    preset = config.load(overrides=["--model.preset=gpt-oss-20b"]).model
    assert model.experts == preset.experts.model_copy(update={"bias_rate": 0.01})
    assert model.rotary_scaling == preset.rotary_scaling


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("--model.layrs=3", ["model.layrs", "3", "model.layers"]),
        ("--modl.layers=3", ["modl", "model"]),
        ("--train.layers=3", ["train.layers", "model.layers"]),
        ("--model.layers=many", ["model.layers", "many", "integer"]),
        ("--model.block=diagonal", ["model.block", "diagonal", "serial"]),
        ("--model.heads=7", ["model.heads=7", "model.hidden=256", "divisor"]),
        ("--model.preset=gpt3", ["gpt3", "model.preset"]),
        ("--lr.min=1", ["lr.min=1", "lr.peak"]),
        (f"--train.name={'n' * 256}", ["train.name='nnn", "at most 255 characters"]),
        ("model.layers", ["model.layers", "--section.key=value"]),
        ("--parallel.gather_precision=bfloat16", ["parallel.gather_precision", "bfloat16", "auto", "default"]),
        ("--parallel.gather_precision=float8", ["linear_precision is default", "--train.linear_precision=float8"]),
    ],
)
def test_wrong_keys_and_values_are_named_with_a_remedy(override, parts):
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    for part in parts:
        assert part in str(caught.value)


def test_a_run_may_have_the_longest_name_of_a_file_system():
    assert config.load(None, [f"--train.name={'n' * 255}"]).train.name == "n" * 255


@pytest.mark.parametrize(
    ("linear", "zero", "remedy"),
    [("float8_rowwise", 1, "--train.linear_precision=float8"), ("float8", 0, "zero=1")],
)
def test_gathers_in_float8_that_cannot_be_had_are_refused(linear, zero, remedy):
    arguments = [f"--train.linear_precision={linear}", f"--parallel.zero={zero}", "--parallel.gather_precision=float8"]
    with pytest.raises(ConfigError, match=f"parallel.gather_precision=float8.*{remedy}"):
        config.load(None, arguments)
    config.load(None, arguments[:2])


def test_reductions_by_copies_need_sharded_gradients():
    with pytest.raises(ConfigError, match=r"overlap\.reductions=copies.*--parallel\.zero=2"):
        config.load(None, ["--parallel.zero=1", "--overlap.reductions=copies"])
    config.load(None, ["--parallel.zero=2", "--parallel.reduce_dtype=bfloat16", "--overlap.reductions=copies"])


def test_kept_layers_need_sharded_matrices():
    with pytest.raises(
        ConfigError, match=r"parallel\.zero3_keep_layers=2.*parallel\.zero is 2; set --parallel\.zero=3"
    ):
        config.load(None, ["--parallel.zero=2", "--parallel.zero3_keep_layers=2"])
    kept = config.load(None, ["--parallel.zero=3", "--parallel.zero3_keep_layers=2", "--model.layers=8"])
    assert kept.parallel.zero3_keep_layers == 2
    arguments = [
        "--parallel.zero=3",
        "--parallel.zero3_keep_layers=2",
        "--model.layers=8",
        "--model.vocab_size=64",
        "--parallel.virtual_stages=4",
    ]
    with pytest.raises(
        FitError, match=r"zero3_keep_layers=2 with parallel\.virtual_stages=4.*virtual_stages=3 or less"
    ):
        lay_out(config.load(None, arguments), 1)


def test_files_that_are_not_there_or_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="folder"):
        config.load(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\nlayers=")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(broken)


def test_global_batch_must_divide():
    wrong = config.load(None, ["--train.micro_batch=3", "--train.global_batch=8"])
    with pytest.raises(FitError, match=r"global_batch=8.*try --train.global_batch=9"):
        wrong.count_microbatches(1)


@pytest.mark.parametrize("name", config.list_presets())
def test_resolved_tree_survives_a_round_trip(name):
    result = config.load(
        None, [f"--model.preset={name}", '--train.sample_prompt=a "b"\\n\tc', "--data.weights=[1.5]"][:2]
    )
    assert config.from_tree(tomllib.loads(result.to_toml())) == result


scalars = st.one_of(st.integers(-9, 2**40), st.floats(allow_nan=True), st.text(max_size=8), st.booleans(), st.none())
keys = st.one_of(st.sampled_from(list(config.Config.model_fields)), st.text(max_size=6))
fields = sorted({k for f in config.Config.model_fields.values() for k in f.annotation.model_fields})


@given(
    st.dictionaries(
        keys,
        st.one_of(
            scalars,
            st.dictionaries(
                st.one_of(st.sampled_from(fields), st.text(max_size=5)),
                st.one_of(scalars, st.lists(scalars, max_size=3)),
                max_size=4,
            ),
        ),
        max_size=3,
    )
)
def test_any_tree_is_accepted_or_refused_with_a_message(tree):
    try:
        result = config.from_tree(tree)
    except MegascaleError as error:
        assert str(error)
    else:
        assert config.from_tree(tomllib.loads(result.to_toml())) == result


@given(st.text(max_size=30))
def test_any_override_text_is_accepted_or_refused_with_a_message(text):
    try:
        config.load(None, ["--" + text])
    except MegascaleError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("gemms", "hidden", "micro_batch", "on_side_stream"),
    [
        ("auto", 5120, 2, True), ("auto", 5120, 3, False), ("auto", 2048, 1, False), ("on", 2048, 8, True),
        ("off", 5120, 1, False),
    ],
)  # fmt: skip
def test_gemms_share_two_streams_where_it_pays_or_as_told(gemms, hidden, micro_batch, on_side_stream):
    report = {
        "model": {"hidden": hidden, "heads": 16, "sequence_length": 2048},
        "train": {"micro_batch": micro_batch, "global_batch": micro_batch},
        "overlap": {"gemms": gemms},
    }
    assert config.from_tree(report).gemms_on_side_stream is on_side_stream


def test_lamb_has_its_own_rate():
    lamb = "--optimizer.name=lamb"
    assert config.load(None, []).lr.peak == config.load(None, ["--optimizer.name=adamw"]).lr.peak == 3e-4
    assert config.load(None, [lamb]).lr.peak == 5e-3
    assert config.load(None, [lamb, "--lr.warmup_steps=3"]).lr.peak == 5e-3
    assert config.load(None, [lamb, "--lr.peak=2e-4"]).lr.peak == 2e-4
    with pytest.raises(ConfigError, match=r"lr.min=0.01 is above lr.peak=0.005"):
        config.load(None, [lamb, "--lr.min=1e-2"])
    repeated = config.load(None, [lamb])
    assert config.from_tree(tomllib.loads(repeated.to_toml())) == repeated


PATHS = st.text(min_size=1).filter(lambda text: not text.startswith("~"))  # the home folder


@settings(max_examples=300)
@given(st.text(min_size=1), PATHS, st.lists(PATHS, min_size=1, max_size=3))
def test_every_string_survives_being_written_and_read(text, path, several):
    tree = {"train": {"sample_prompt": text}, "data": {"train": several, "tokenizer": path}}
    result = config.from_tree(tree)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        result.write(file)
        assert config.load(file) == result


@example("1\nb = 2")
@given(st.text())
def test_an_override_of_text_is_taken_whole(text):
    assert config.load(None, [f"--train.sample_prompt=1{text}"]).train.sample_prompt == "1" + text


def test_text_that_is_not_unicode_is_named():
    with pytest.raises(ConfigError, match=r"train\.sample_prompt"):
        config.load(None, ["--train.sample_prompt=\udc80"])


@pytest.mark.parametrize("key", ["lr.peak", "optimizer.clip", "rendezvous.timeout", "model.rotary_base"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_setting_that_is_no_number_is_refused(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        config.load(None, [f"--{key}={value}"])


@pytest.mark.parametrize(("head_dim", "fraction"), [(8, 0.1), (64, 0.03), (2, 0.5), (6, 0.16)])
def test_rotary_positions_that_turn_no_pair_are_refused(head_dim, fraction):
    arguments = [f"--model.head_dim={head_dim}", f"--model.rotary_fraction={fraction}"]
    with pytest.raises(ConfigError, match=rf"model\.rotary_fraction={fraction} of a head of {head_dim} .* pair"):
        config.load(None, arguments + ["--model.positions=rotary"])
    assert config.load(None, arguments + ["--model.positions=learned"]).model.rotary_fraction == fraction


@pytest.mark.parametrize(("head_dim", "fraction"), [(8, 0.25), (64, 0.032), (2, 1.0)])
def test_one_rotary_pair_is_enough(head_dim, fraction):
    arguments = [f"--model.head_dim={head_dim}", f"--model.rotary_fraction={fraction}", "--model.positions=rotary"]
    assert config.load(None, arguments).model.rotary_fraction == fraction


@pytest.mark.parametrize(
    "override",
    [
        "--model.layers=100000000", "--model.hidden=1e12", "--model.vocab_size=10000000000", "--model.heads=10000000",
        "--model.sequence_length=100000000000", "--train.global_batch=2e9", "--train.micro_batch=1000000000",
        "--train.threads=1000000", "--train.seed=99999999999999999999", "--train.steps=1e15", "--data.ring_steps=1e9",
        "--data.loader_threads=1e6", "--parallel.pipeline=1e9", "--parallel.virtual_stages=1e9",
        "--parallel.tensor=1e12", "--resilience.nodes=1e9", "--resilience.spares=1e9",
    ],
)  # fmt: skip
def test_sizes_that_nobody_means_are_named_with_their_bound(override):
    with pytest.raises(ConfigError) as caught:
        config.load(None, [override])
    assert override.removeprefix("--").partition("=")[0] in str(caught.value)
    assert "less than or equal to" in str(caught.value)


def test_every_size_has_an_upper_bound():
    free = []
    for section, table in config.Config.model_fields.items():
        for key, details in table.annotation.model_fields.items():
            if details.annotation in (int, int | None) and not any(hasattr(m, "le") for m in details.metadata):
                free.append(f"{section}.{key}")
    assert free == []


def test_command_lines_with_and_without_a_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nsteps = 7\n")
    assert config.load_command_line(None, ["--train.seed=5"]).train.seed == 5
    # Where a command takes FILE first, an override may stand in its place, and FILE behind it.
    assert config.load_command_line("--data.train=s3://a//b", ["--train.seed=5"]).data.train == ["s3://a//b"]
    result = config.load_command_line("--train.seed", ["5", str(file), "--lr.min=0"])
    assert (result.train.steps, result.train.seed) == (7, 5)
    with pytest.raises(ConfigError, match="unknown argument 'more'"):
        config.load_command_line(file, ["more"])


@pytest.mark.parametrize("axis", ["context", "expert"])
def test_copies_along_an_axis_of_one_rank_are_refused(axis):
    with pytest.raises(ConfigError, match=rf"overlap.{axis}=copies.*--overlap.{axis}=auto"):
        config.load(None, [f"overlap.{axis}=copies"])
    config.load(None, [f"overlap.{axis}=auto"])


def test_heads_of_a_single_context_rank_are_not_exchanged_in_parts():
    with pytest.raises(ConfigError, match=r"overlap.context_parts=true.*--parallel.context=2 or more"):
        config.load(None, ["overlap.context_parts=true"])
    config.load(None, ["overlap.context_parts=true", "parallel.context=2"])


def test_context_ranks_get_more_channels_for_data():
    assert config.from_tree({}).max_channels("data") == 12
    assert config.from_tree({"parallel": {"context": 4}}).max_channels("data") == 24
    assert config.from_tree({"parallel": {"context": 4}, "overlap": {"data_channels": 6}}).max_channels("data") == 6
    assert config.from_tree({"parallel": {"context": 4}, "overlap": {"data": False}}).max_channels("data") is None


def test_an_address_may_have_the_brackets_of_ipv6():
    resilience = config.load(None, ["--resilience.listen=[::1]", "--resilience.advertise=[fd00::7]"]).resilience
    assert (resilience.listen, resilience.advertise) == ("::1", "fd00::7")
