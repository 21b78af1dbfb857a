"""Old configuration keys: read from files and overrides, one line each, and an error where both names are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale import config
from megascale.config import migration
from megascale.errors import ConfigError

# Old key, a value that differs from the default, another one.
VALUES: dict[str, tuple[object, object]] = {
    "parallel.round_size": (4, 8),
    "overlap.products": ("off", "on"),
    "resilience.patience": (12.5, 25.0),
    "resilience.fruitless": (7, 9),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has noted nothing yet."""
    monkeypatch.setattr(migration, "_noted", set())


def toml(*settings: tuple[str, object]) -> str:
    """A file that sets section.key to values."""
    text = ""
    for name, value in settings:
        section, _, key = name.partition(".")
        text += f"[{section}]\n" if f"[{section}]\n" not in text else ""
        text += f"{key} = {value!r}\n".replace("'", '"')
    return text


def value_of(found: config.Config, name: str) -> object:
    section, _, key = name.partition(".")
    return getattr(getattr(found, section), key)


def extra(name: str) -> list[str]:
    """What else makes a value of this key valid."""
    return ["--parallel.virtual_stages=2", "--parallel.pipeline=2"] if name.startswith("parallel.") else []


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_every_renamed_key_is_tried_here_and_its_new_name_exists():
    assert VALUES.keys() == migration.RENAMED.keys()
    for old, new in migration.RENAMED.items():
        value_of(config.load(None), new)
        with pytest.raises(AttributeError):
            value_of(config.load(None), old)


@pytest.mark.parametrize("old", VALUES)
def test_an_old_key_in_a_file_sets_the_new_one_with_one_line(tmp_path, capsys, old):
    file = tmp_path / "old.toml"
    file.write_text(toml((old, VALUES[old][0])))
    new = migration.RENAMED[old]
    for _ in range(3):
        assert value_of(config.load(file, extra(old)), new) == VALUES[old][0]
    assert notes(capsys) == [f"note: {old} is called {new} now; the old name is still read"]


@pytest.mark.parametrize("old", VALUES)
@pytest.mark.parametrize("in_file", ["old", "new"])
@pytest.mark.parametrize("override", ["old", "new"])
def test_an_override_beats_the_file_under_either_name(tmp_path, capsys, old, in_file, override):
    new, (first, second) = migration.RENAMED[old], VALUES[old]
    file = tmp_path / "some.toml"
    file.write_text(toml((old if in_file == "old" else new, first)))
    found = config.load(file, [*extra(old), f"--{old if override == 'old' else new}={second}"])
    assert value_of(found, new) == second
    assert len(notes(capsys)) == ("old" in (in_file, override))


@pytest.mark.parametrize("old", VALUES)
def test_both_names_in_one_file_are_an_error_that_names_both(tmp_path, old):
    new, (first, second) = migration.RENAMED[old], VALUES[old]
    file = tmp_path / "both.toml"
    file.write_text(toml((old, first), (new, second)))
    for overrides in ([], [f"--{old}={second}"], [f"--{new}={second}"]):
        with pytest.raises(ConfigError, match=f"{old} is the old name of {new}, and both are given; leave {old} out"):
            config.load(file, overrides)


def test_a_file_of_old_keys_only_is_written_with_new_ones(tmp_path, capsys):
    file, again = tmp_path / "old.toml", tmp_path / "new.toml"
    file.write_text(toml(*((old, first) for old, (first, _) in VALUES.items())))
    found = config.load(file, extra("parallel."))
    assert len(notes(capsys)) == len(VALUES)
    found.write(again)
    assert config.load(again) == found
    assert notes(capsys) == []
    assert not {old.partition(".")[2] for old in VALUES} & {
        line.split(" ")[0] for line in again.read_text().splitlines()
    }


def test_a_value_that_is_wrong_is_named_by_the_new_key(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(toml(("resilience.fruitless", "many")))
    with pytest.raises(ConfigError, match=r"resilience\.no_progress_limit='many'"):
        config.load(file)


TREES = st.dictionaries(
    st.sampled_from(["parallel", "overlap", "resilience", "train"]),
    st.one_of(
        st.integers(),
        st.dictionaries(
            st.sampled_from(
                [each.partition(".")[2] for pair in migration.RENAMED.items() for each in pair] + ["steps", "tensor"]
            ),
            st.integers(),
        ),
    ),
)


@given(TREES)
def test_any_tree_keeps_its_values_or_is_refused(tree):
    before = {name: dict(table) if isinstance(table, dict) else table for name, table in tree.items()}
    try:
        found = migration.migrate(tree)
    except ConfigError:
        pairs = [(old.split("."), new.split(".")) for old, new in migration.RENAMED.items()]
        assert any({old[1], new[1]} <= tree[old[0]].keys() for old, new in pairs if isinstance(tree.get(old[0]), dict))
        return
    assert tree == before  # the caller's own is left alone
    assert migration.migrate(found) == found
    for name, table in tree.items():
        if not isinstance(table, dict):
            assert found[name] == table
            continue
        renamed = {
            migration.RENAMED.get(f"{name}.{key}", f"{name}.{key}").partition(".")[2]: v for key, v in table.items()
        }
        assert found[name] == renamed
