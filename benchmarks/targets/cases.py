"""Cases of `benchmarks targets`: the benchmark to run, its GPUs, and its targets. TOML files hold them."""

from __future__ import annotations

import hashlib
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megascale.config import Config
from megascale.core import strict_json
from megascale.errors import ConfigError, MegascaleError

# Command that starts a benchmark.
PROGRAM = ("python", "-m", "benchmarks")
# The shipped files of cases, in the order of their runs.
SHIPPED_FILES = ("targets.toml", "targets_float8.toml", "targets_graphs.toml")
# Keys of a case in files of earlier releases, and their present names.
RENAMED_KEYS = {"must": "target", "aim": "stretch", "over": "baseline", "least": "min_data"}
# Keys that a case and its baseline must share, since their step times are not comparable otherwise.
_SHARED_KEYS = ("bench", "gpus", "data", "min_data")


@dataclass(frozen=True)
class Figure:
    """A measured quantity for which a case can have a target.

    Attributes:
        label: name in the table.
        number_format: format string of a value.
        description: meaning, for a label that does not explain itself; else empty.
        benches: benchmarks that report it.
        higher_is_better: whether the target is a lower bound.
        is_ratio: whether it compares the steps of two cases, so that the case needs a `baseline`.
    """

    label: str
    number_format: str
    description: str
    benches: tuple[str, ...]
    higher_is_better: bool = False
    is_ratio: bool = False

    def format(self, value: float) -> str:
        """Return `value` as text."""
        return self.number_format.format(value)

    def format_bound(self, value: float) -> str:
        """Return `value` as the text of a target, such as "≥57.0%"."""
        sign = "≥" if self.higher_is_better else "≤"
        return sign + self.format(value)

    def meets(self, value: float, bound: float) -> bool:
        """Return whether `value` reaches `bound`."""
        if self.higher_is_better:
            return value >= bound
        return value <= bound


_TRAIN = ("train",)
_EXPOSED = ("exposed",)
_EXPOSED_SHARE = "exposed time of its collectives over their time with nothing else running"
FIGURES = {
    "mfu": Figure("MFU", "{:.1%}", "", _TRAIN, higher_is_better=True),
    "step_seconds": Figure("step", "{:.3f} s", "", _TRAIN + _EXPOSED),
    "memory_gib": Figure("peak GiB", "{:.1f}", "", _TRAIN),
    "p99_over_median": Figure("p99/p50", "{:.3f}", "99th percentile of the step times over their median", _TRAIN),
    "first_over_last": Figure(
        "drift", "{:.2%}", "relative difference of the median steps of the first and the last tenth", _TRAIN
    ),
    "step_ratio": Figure(
        "ratio", "{:.3f}", "step over the baseline's step, both of the same repeat", _TRAIN, is_ratio=True
    ),
    "speed_up": Figure(
        "speed-up",
        "{:.3f}",
        "baseline's step over the step, both of the same repeat",
        _TRAIN,
        higher_is_better=True,
        is_ratio=True,
    ),
    "tensor_exposed": Figure("TP comm", "{:.1%}", _EXPOSED_SHARE, _EXPOSED),
    "pipeline_exposed": Figure("PP comm", "{:.1%}", _EXPOSED_SHARE, _EXPOSED),
    "data_exposed": Figure("DP comm", "{:.1%}", _EXPOSED_SHARE, _EXPOSED),
    "idle_share": Figure("idle", "{:.1%}", "share of the traced step without any kernel or copy", _EXPOSED),
}


class TargetCase(BaseModel):
    """One case. Batch sizes are in sequences, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$", max_length=8)
    title: str = Field(max_length=26)
    bench: Literal["train", "exposed"] = "train"
    arguments: list[str] = Field(min_length=1, description="a shipped shape, then settings as --section.key=value")
    gpus: int = Field(ge=0, description="GPUs per replica of the model; 0 runs on the CPU")
    batch: int = Field(ge=1, description="sequences per replica and step")
    data: int = Field(1, ge=1, description="data-parallel replicas for which the targets are stated")
    min_data: int = Field(1, ge=1, description="smallest number of replicas that can run the case")
    steps: int = Field(20, ge=1, description="timed steps of bench train")
    warmup: int = Field(5, ge=2, description="steps before the timed or traced ones")
    watch: bool = Field(False, description="whether to give bench train --watch")
    environment: dict[str, str] = {}
    seconds: float = Field(gt=0, description="estimated duration of a run, start included")
    target: dict[str, float] = Field({}, description="value that each figure has to reach")
    stretch: dict[str, float] = Field({}, description="more ambitious value of figures in target")
    baseline: str | None = Field(None, description="case with whose step step_ratio and speed_up compare")

    @model_validator(mode="after")
    def _check_consistency(self) -> TargetCase:
        if self.arguments[0].startswith("-"):
            raise ValueError(f"arguments begin with {self.arguments[0]!r}; name a shipped shape first, such as gpt-13b")
        if self.min_data > self.data:
            raise ValueError(f"min_data={self.min_data} is more than data={self.data}; lower min_data")
        if self.bench == "exposed" and (self.watch or "steps" in self.model_fields_set):
            raise ValueError("watch and steps are keys of bench='train'; remove them, bench='exposed' traces one step")
        if self.bench == "exposed" and self.gpus * self.min_data < 2:
            raise ValueError(
                f"bench='exposed' needs two GPUs, but gpus x min_data is {self.gpus} x {self.min_data}; raise min_data"
            )
        for name in [*self.target, *self.stretch]:
            self._check_figure(name)
        for name, value in self.stretch.items():
            if name not in self.target:
                raise ValueError(f"stretch has {name}, which target lacks; add target.{name}")
            if not FIGURES[name].meets(value, self.target[name]):
                raise ValueError(
                    f"stretch.{name}={value} is easier than target.{name}={self.target[name]}; exchange them"
                )
        return self

    def _check_figure(self, name: str) -> None:
        figure = FIGURES.get(name)
        if figure is None or self.bench not in figure.benches:
            reported = ", ".join(key for key, candidate in FIGURES.items() if self.bench in candidate.benches)
            raise ValueError(f"bench {self.bench} does not report the figure {name!r}; use one of {reported}")
        if figure.is_ratio and self.baseline is None:
            raise ValueError(f"{name} compares with another case; name it, such as baseline='F3'")

    def describe_targets(self) -> str:
        """Return the targets and stretch targets as text, empty without targets."""
        descriptions = []
        for name, value in self.target.items():
            figure = FIGURES[name]
            description = f"{figure.label} {figure.format_bound(value)}"
            if name in self.stretch:
                description += f" (stretch {figure.format(self.stretch[name])})"
            descriptions.append(description)
        return ", ".join(descriptions)

    @property
    def max_gpus(self) -> int:
        """Return the number of GPUs for which the targets are stated."""
        return self.gpus * self.data

    def count_replicas(self, gpus: int) -> int | None:
        """Return how many replicas, at most `data`, run on `gpus` GPUs, or None for fewer than `min_data`."""
        replicas = self.data
        if self.gpus:
            replicas = min(self.data, gpus // self.gpus)
        if replicas < self.min_data:
            return None
        return replicas

    def list_settings(self, replicas: int) -> list[str]:
        """Return the shape and the settings of model and layout, as arguments of the benchmark."""
        return self.arguments + [f"--parallel.data={replicas}", f"--train.global_batch={replicas * self.batch}"]

    def list_arguments(self, replicas: int) -> list[str]:
        """Return the name of the benchmark and its arguments."""
        arguments = [self.bench] + self.list_settings(replicas)
        if self.bench == "train":
            arguments.append(f"--steps={self.steps}")
        arguments.append(f"--warmup={self.warmup}")
        if self.watch:
            arguments.append("--watch")
        return arguments

    def format_command(self, replicas: int) -> str:
        """Return the shell command of a run, which begins with the environment variables."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *PROGRAM, shlex.join(self.list_arguments(replicas))])

    def make_key(self, replicas: int) -> str:
        """Return a digest of what a run measures. It does not depend on title, targets or estimated duration."""
        subject = strict_json.dumps([self.list_arguments(replicas), self.environment], sort_keys=True)
        return hashlib.blake2b(subject.encode(), digest_size=8).hexdigest()

    def make_config(self, replicas: int) -> Config:
        """Return the benchmark's configuration.

        Raises a MegascaleError that names the case if a setting is wrong or does not divide.
        """
        from megascale.bench.train import load_shape_config
        from megascale.core.layout import lay_out

        shape, *settings = self.list_settings(replicas)
        try:
            config = load_shape_config([f"--model.preset={shape}", "--train.precision=bfloat16"] + settings)
            model_ranks = config.parallel.tensor * config.parallel.pipeline
            if self.gpus not in (0, model_ranks):
                raise ConfigError(f"gpus={self.gpus}, but tensor x pipeline is {model_ranks}; set gpus={model_ranks}")
            lay_out(config, model_ranks * replicas)
        except MegascaleError as error:
            raise type(error)(f"case {self.name}: {error}") from None
        return config


class _CaseFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    case: list[TargetCase] = Field(min_length=1)


def read_shipped_file(name: str) -> str:
    """Return the text of a file of this package."""
    return (resources.files("benchmarks.targets") / name).read_text()


def load_cases(file: Path | None) -> list[TargetCase]:
    """Return the cases of a TOML file, or the shipped cases for None.

    Raises ConfigError naming the case, the key and the value if the file is wrong.
    """
    source = f"--file={file or SHIPPED_FILES[0]}"
    try:
        if file is None:
            text = "\n".join(read_shipped_file(name) for name in SHIPPED_FILES)
        else:
            text = file.read_text()
        tree = tomllib.loads(text)
        cases = _CaseFile.model_validate(tree).case
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}; name a TOML file with [[case]] tables") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    except ValidationError as error:
        messages = [f"{source}: {_explain(detail, tree)}" for detail in error.errors()]
        raise ConfigError("\n".join(messages)) from None
    _check_names(source, cases)
    _check_baselines(source, cases)
    return cases


def _check_names(source: str, cases: Sequence[TargetCase]) -> None:
    names = set()
    for case in cases:
        if case.name in names:
            raise ConfigError(f"{source}: two cases are named {case.name!r}; rename one")
        names.add(case.name)


def _check_baselines(source: str, cases: Sequence[TargetCase]) -> None:
    by_name = {case.name: case for case in cases}
    for case in cases:
        if case.baseline is None:
            continue
        setting = f"{source}: case {case.name}: baseline={case.baseline!r}"
        baseline = by_name.get(case.baseline)
        if baseline is None or baseline is case:
            raise ConfigError(f"{setting} does not name another case of the file; name one of {', '.join(by_name)}")
        for key in _SHARED_KEYS:
            if getattr(baseline, key) != getattr(case, key):
                raise ConfigError(
                    f"{setting} has another {key}, so their steps are not comparable; give both the same "
                    f"{', '.join(_SHARED_KEYS)}"
                )


def _explain(error: Any, tree: dict[str, Any]) -> str:
    """Return the message for an error of the validation of `tree`."""
    location = list(error["loc"])
    if len(location) < 2 or location[0] != "case" or not isinstance(location[1], int):
        key = ".".join(map(str, location))
        return f"{key}={str(error['input'])[:60]} is wrong: {error['msg']}; write cases as tables [[case]]"
    index = location[1]
    name = f"case {index + 1}"
    table = tree["case"][index]
    if isinstance(table, dict):
        name = f"case {table.get('name', index + 1)}"
    key = ".".join(map(str, location[2:]))
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        if key in RENAMED_KEYS:
            return f"{name}: the key {key} was renamed; write {RENAMED_KEYS[key]} = {error['input']!r}"
        return f"{name}: unknown key {key} (value {error['input']!r}); use {', '.join(TargetCase.model_fields)}"
    if error["type"] == "missing":
        return f"{name}: {key} is missing ({TargetCase.model_fields[key].description or 'see targets.toml'})"
    return f"{name}: {key}={error['input']!r} is wrong: {error['msg'][0].lower()}{error['msg'][1:]}"
