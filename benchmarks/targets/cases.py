"""Cases of `benchmarks targets`: what to run, on how many GPUs, and what must come of it. Data, in a TOML file."""

from __future__ import annotations

import hashlib
import shlex
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megascale.config import Config
from megascale.core import strict_json
from megascale.errors import ConfigError, MegascaleError

# Shell words that start a benchmark.
PROGRAM = ("python", "-m", "benchmarks")
# The shipped files of cases, in the order of their runs.
SHIPPED = ("targets.toml", "targets_float8.toml", "targets_graphs.toml")


@dataclass(frozen=True)
class Figure:
    """Something that a case may have to reach.

    Attributes:
        label: in the table.
        form: how to print a value.
        about: what it is, where the label does not say.
        benches: which tell it.
        least: it must be at least, not at most, what the case says.
        ratio: of two cases' steps, so the case needs `over`.
    """

    label: str
    form: str
    about: str
    benches: tuple[str, ...]
    least: bool = False
    ratio: bool = False

    def bound(self, value: float) -> str:
        """A value as something to reach."""
        return f"{'≥' if self.least else '≤'}{self.form.format(value)}"

    def meets(self, value: float, bound: float) -> bool:
        """Return whether `value` reaches `bound`."""
        if self.least:
            return value >= bound
        return value <= bound


_TRAIN, _EXPOSED = ("train",), ("exposed",)
_SHOWS = "exposed, of the same collectives alone"
FIGURES = {
    "mfu": Figure("MFU", "{:.1%}", "", _TRAIN, least=True),
    "step_seconds": Figure("step, s", "{:.3f}", "", _TRAIN + _EXPOSED),
    "memory_gib": Figure("GiB", "{:.1f}", "", _TRAIN),
    "p99_over_median": Figure("p99", "{:.3f}", "99th percentile of steps over their median", _TRAIN),
    "first_over_last": Figure("drift", "{:.2%}", "median of the first tenth of steps against the last", _TRAIN),
    "step_ratio": Figure("ratio", "{:.3f}", "its step over the other case's, repeat by repeat", _TRAIN, ratio=True),
    "speed_up": Figure("speed-up", "{:.3f}", "the other case's step over its own", _TRAIN, least=True, ratio=True),
    "tensor_exposed": Figure("tensor", "{:.1%}", _SHOWS, _EXPOSED),
    "pipeline_exposed": Figure("pipeline", "{:.1%}", _SHOWS, _EXPOSED),
    "data_exposed": Figure("data", "{:.1%}", _SHOWS, _EXPOSED),
    "idle_share": Figure("idle", "{:.1%}", "nothing runs, of the traced step; waiting transfers run", _EXPOSED),
}


class TargetCase(BaseModel):
    """One case. Batches are sequences, times seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$", max_length=8)
    title: str = Field(max_length=26)
    bench: Literal["train", "exposed"] = "train"
    arguments: list[str] = Field(min_length=1, description="a shipped shape, then settings as --section.key=value")
    gpus: int = Field(ge=0, description="of one replica of the model; 0: on the CPU")
    batch: int = Field(ge=1, description="of one replica")
    data: int = Field(1, ge=1, description="replicas that the target is stated for")
    least: int = Field(1, ge=1, description="replicas without which it does not fit")
    steps: int = Field(20, ge=1, description="timed; of bench train")
    warmup: int = Field(5, ge=2)
    watch: bool = Field(False, description="bench train --watch")
    environment: dict[str, str] = {}
    seconds: float = Field(gt=0, description="that a run takes, start included: an estimate")
    must: dict[str, float] = {}
    aim: dict[str, float] = {}
    over: str | None = Field(None, description="case whose step the figures step_ratio and speed_up compare with")

    @model_validator(mode="after")
    def _consistent(self) -> TargetCase:
        if self.arguments[0].startswith("-"):
            raise ValueError(f"arguments begin with {self.arguments[0]!r}; name a shipped shape first, such as gpt-13b")
        if self.least > self.data:
            raise ValueError(f"least={self.least} is more than data={self.data}; lower least")
        if self.bench == "exposed" and (self.watch or "steps" in self.model_fields_set):
            raise ValueError("watch and steps are of bench train, and bench='exposed' traces one step; leave them out")
        if self.bench == "exposed" and self.gpus * self.least < 2:
            raise ValueError(f"bench='exposed' needs two GPUs, gpus x least is {self.gpus} x {self.least}; raise least")
        for name in (*self.must, *self.aim):
            figure = FIGURES.get(name)
            if figure is None or self.bench not in figure.benches:
                expected = ", ".join(n for n, f in FIGURES.items() if self.bench in f.benches)
                raise ValueError(f"there is no figure {name!r} of bench {self.bench}; there are {expected}")
            if figure.ratio and self.over is None:
                raise ValueError(f"{name} compares with another case; name it, such as over='F3'")
        worse = [n for n in self.aim if n not in self.must or not FIGURES[n].meets(self.aim[n], self.must[n])]
        if worse:
            raise ValueError(f"aim has {worse[0]}, and must has not or more than that; an aim goes beyond its must")
        return self

    @property
    def goals(self) -> str:
        """Return the bound and the aim as text."""
        output = []
        for name, value in self.must.items():
            if name in self.aim:
                aim = f" (aim {FIGURES[name].form.format(self.aim[name])})"
            else:
                aim = ""
            output.append(f"{FIGURES[name].label} {FIGURES[name].bound(value)}{aim}")
        return ", ".join(output)

    @property
    def slots(self) -> int:
        """GPUs of the whole case."""
        return self.gpus * self.data

    def replicas(self, gpus: int) -> int | None:
        """The most replicas, up to `data`, that so many GPUs hold; None if they hold too few."""
        if self.gpus:
            fit = min(self.data, gpus // self.gpus)
        else:
            fit = self.data
        return fit if fit >= self.least else None

    def settings(self, replicas: int) -> list[str]:
        """Return the bench's settings of shape and layout."""
        return self.arguments + [f"--parallel.data={replicas}", f"--train.global_batch={replicas * self.batch}"]

    def words(self, replicas: int) -> list[str]:
        """The bench's words, its name first."""
        if self.bench == "train":
            steps = [f"--steps={self.steps}"]
        else:
            steps = []
        watch = ["--watch"] if self.watch else []
        return [self.bench] + self.settings(replicas) + steps + [f"--warmup={self.warmup}"] + watch

    def line(self, replicas: int) -> str:
        """Return the command line of the same run."""
        return " ".join(
            [f"{k}={shlex.quote(v)}" for k, v in self.environment.items()]
            + list(PROGRAM)
            + [shlex.join(self.words(replicas))]
        )

    def key(self, replicas: int) -> str:
        """Changes with what is measured, not with what it must reach."""
        subject = strict_json.dumps([self.words(replicas), self.environment], sort_keys=True)
        return hashlib.blake2b(subject.encode(), digest_size=8).hexdigest()

    def config(self, replicas: int) -> Config:
        """Return the bench's configuration. Raise MegascaleError for wrong or indivisible arguments."""
        from megascale.bench.train import load_shape_config
        from megascale.core.layout import lay_out

        shape, *settings = self.settings(replicas)
        try:
            config = load_shape_config([f"--model.preset={shape}", "--train.precision=bfloat16"] + settings)
            model = config.parallel.tensor * config.parallel.pipeline
            if self.gpus not in (0, model):
                raise ConfigError(f"gpus={self.gpus}, but its tensor x pipeline is {model}; set gpus={model}")
            lay_out(config, model * replicas)
        except MegascaleError as error:
            raise type(error)(f"case {self.name}: {error}") from None
        return config


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    case: list[TargetCase] = Field(min_length=1)


def shipped(name: str) -> str:
    """The text of a file of this package."""
    return (resources.files("benchmarks.targets") / name).read_text()


def load(file: Path | None) -> list[TargetCase]:
    """The cases of a TOML file, of the shipped ones for None; ConfigError naming case, key and value if it is wrong."""
    name = str(file or "targets.toml")
    try:
        if file is None:
            text = "\n".join(map(shipped, SHIPPED))
        else:
            text = file.read_text()
        tree = tomllib.loads(text)
        cases = _File.model_validate(tree).case
    except OSError as error:
        raise ConfigError(
            f"--file={name} cannot be read: {error.strerror}; python -m benchmarks targets --help"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file={name} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError("\n".join(f"--file={name}: {_explain(e, tree)}" for e in error.errors())) from None
    by_name = {case.name: case for case in cases}
    twice = [c.name for c in cases if by_name[c.name] is not c]
    if twice:
        raise ConfigError(f"--file={name}: there are two cases {twice[0]!r}; rename one")
    for case in cases:
        if case.over is None:
            continue
        second = by_name.get(case.over)
        if second is None or second is case:
            raise ConfigError(f"--file={name}: case {case.name}: over={case.over!r} is no other case of the file")
        equal = ("bench", "gpus", "data", "least")
        differs = [key for key in equal if getattr(second, key) != getattr(case, key)]
        if differs:
            raise ConfigError(
                f"--file={name}: case {case.name}: over={case.over!r} has another {differs[0]}, so their steps do not "
                f"compare; give both the same {', '.join(equal)}"
            )
    return cases


def _explain(error: Any, tree: dict[str, Any]) -> str:
    location = list(error["loc"])
    if len(location) < 2 or location[0] != "case" or not isinstance(location[1], int):
        expected = "cases are tables [[case]]"
        return f"{'.'.join(map(str, location))}={str(error['input'])[:60]} is wrong: {error['msg']}; {expected}"
    report = tree["case"][location[1]]
    name = f"case {report.get('name', location[1] + 1) if isinstance(report, dict) else location[1] + 1}"
    key = ".".join(map(str, location[2:]))
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        return f"{name}: there is no key {key} (value {error['input']!r}); known: {', '.join(TargetCase.model_fields)}"
    if error["type"] == "missing":
        return f"{name}: {key} is missing ({TargetCase.model_fields[key].description or 'see targets.toml'})"
    return f"{name}: {key}={error['input']!r} is wrong: {error['msg'][0].lower()}{error['msg'][1:]}"
