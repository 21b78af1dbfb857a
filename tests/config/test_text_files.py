"""Files that people write: byte order marks of their editors, and ~ for the home folder in their paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megascale.config import Config, from_tree, load
from megascale.config.text_files import decode_text, read_toml
from megascale.core.launch_files import read_environment
from megascale.errors import ConfigError
from megascale.resilience.cluster.ssh import read_hosts, split_command
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.fabric.fabric_spec import load_fabric

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le with a mark", "utf-16-be with a mark"]
# Every setting that is a path of this machine.
PATHS = [
    "data.train",
    "data.valid",
    "data.tokenizer",
    "train.runs",
    "checkpoint.location",
    "checkpoint.imported",
    "checkpoint.start_from",
    "rendezvous.tls_ca",
    "rendezvous.tls_certificate",
    "rendezvous.tls_key",
    "resilience.hosts",
    "resilience.placement",
    "resilience.environment",
    "resilience.targets",
    "resilience.tls_certificate",
    "resilience.tls_key",
    "kubernetes.kubeconfig",
    "kubernetes.pod",
    "slurm.image",
]
# Their descriptions mention files or folders, but not of this machine.
NO_PATHS = {"train.name", "data.text_key", "slurm.mounts", "foreign.checkpoints"}


def encoded(text: str, encoding: str) -> bytes:
    codec, _, mark = encoding.partition(" with ")
    return (("\ufeff" if mark else "") + text).encode(codec)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_file_that_people_write_is_read_whatever_mark_it_begins_with(tmp_path, encoding):
    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.write_bytes(encoded(text.replace("\n", "\r\n"), encoding))
        return file

    config = load(write("job.toml", '[train]\nsteps = 2\n[model]\npreset = "gpt2-124m"\n'))
    assert (config.train.steps, config.model.layers) == (2, 12)
    assert read_environment(write("network.env", "NCCL_IB_TIMEOUT=21\n"), "key") == {"NCCL_IB_TIMEOUT": "21"}
    hosts = read_hosts(str(write("hosts", "gpu01 gpus=8\ngpu02 gpus=8\n")))
    assert [host.host for host in hosts] == ["gpu01", "gpu02"]
    shipped = Path(load_cluster.__code__.co_filename).parent
    for kind, name, read in (("clusters", "a100-roce", load_cluster), ("fabric/fabrics", "", load_fabric)):
        file = next((shipped / kind).glob(f"{name or '*'}.toml"))
        assert read(str(write(f"{kind[:6]}.toml", file.read_text()))) == read(file.stem)
    assert load_calibration(str(write("c.toml", 'name = "n"\ncluster = "c"\n[constants]\n')), "c").name == "n"


def test_what_is_no_text_is_named(tmp_path):
    file = tmp_path / "job.toml"
    file.write_bytes(b"\x80\x81")
    for read in (load, lambda name: load_cluster(str(name)), lambda name: load_fabric(str(name))):
        with pytest.raises(ConfigError, match=r"job\.toml' is not valid TOML"):
            read(file)


def test_the_mark_is_no_part_of_the_text():
    assert decode_text(b"\xef\xbb\xbfa\r\nb\rc\n") == "a\nb\nc\n"
    assert decode_text("\ufeffä".encode("utf-16-be")) == "ä"


def text_settings() -> dict[str, str]:
    """Settings of text or lists of text, with their descriptions."""
    sections = {name: field.annotation.model_fields for name, field in Config.model_fields.items()}
    return {
        f"{section}.{key}": field.description or ""
        for section, fields in sections.items()
        for key, field in fields.items()
        if "str" in str(field.annotation) and "Literal" not in str(field.annotation)
    }


def test_every_path_is_known_as_one():
    named = {key for key, details in text_settings().items() if re.search(r"\b(files?|folders?|PEM)\b", details)}
    assert named - NO_PATHS <= set(PATHS), "a path in which ~ is not the home folder"
    assert set(PATHS) <= set(text_settings())


@pytest.mark.parametrize("key", PATHS)
def test_a_path_begins_at_the_home_folder(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    section, _, name = key.partition(".")

    def read(path: str) -> object:
        value = [path, "other"] if key == "data.train" else path
        pair = {"tls_certificate": "tls_key", "tls_key": "tls_certificate", "targets": "driver_metrics"}.get(name)
        table = {name: value} | ({pair: "x:1"} if pair else {})
        if key == "slurm.image":
            table["container"] = "apptainer"
        if key == "checkpoint.start_from":
            table["start_state"] = "fresh"
        result = getattr(getattr(from_tree({section: table}), section), name)
        return result[0] if key == "data.train" else result

    assert read("~/a b") == f"{tmp_path}/a b"
    assert read("~") == str(tmp_path)
    assert read("./~/a") == "./~/a"
    assert read("a~") == "a~"
    with pytest.raises(ConfigError, match=rf"{key}.*=.*~nobody-of-this-name.*no such home folder"):
        read("~nobody-of-this-name/a")


def test_a_home_folder_is_found_from_overrides_commands_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.toml").write_text('[data]\ntrain = ["~/a", "b"]\n')
    config = load("~/job.toml", ["train.runs=~/runs", "data.valid=~/valid"])
    assert config.data.train == [f"{tmp_path}/a", "b"]
    assert (config.train.runs, config.data.valid) == (f"{tmp_path}/runs", f"{tmp_path}/valid")
    assert load(None, ["data.train=~/a,~/b"]).data.train == [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert load(None, ["checkpoint.location=s3://bucket/~"]).checkpoint.location == "s3://bucket/~"
    assert split_command("ssh -F ~/cluster.config") == ["ssh", "-F", f"{tmp_path}/cluster.config"]


@pytest.mark.parametrize("text", ["a = " + "1" * 5000, "a = " + "[" * 5000])
def test_toml_that_cannot_be_read_is_named(text, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"job\.toml' is not valid TOML"):
        read_toml(file, "configuration file")
