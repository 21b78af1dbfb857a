"""Sizes of the open run, and the results that were predicted before it ran."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prediction:
    """Results that are stated before the run.

    Attributes:
        stated: date.
        loss: held-out loss of the whole file, nats per token: expected, lowest, highest.
        bits_per_byte: the same in bits per byte of text.
        seconds: time in training steps, without starts, saves and evaluations.
        reason: measurements that the figures derive from.
    """

    stated: str
    loss: tuple[float, float, float]
    bits_per_byte: tuple[float, float, float]
    seconds: tuple[float, float, float]
    reason: str


@dataclass(frozen=True)
class OpenRunPlan:
    """One size of the run.

    Attributes:
        name: value of `--size`.
        gpus: data-parallel ranks.
        text_bytes: most bytes of Python source in the data set; None: all source on the machine.
        tokens: trained tokens.
        batch: sequences per step.
        peak: learning rate of AdamW.
        kills: parts of the run after which all its processes are killed.
        saves: checkpoints on the way.
        settings: other settings of `megascale train`.
    """

    name: str
    gpus: int
    text_bytes: int | None
    vocab_size: int
    tokens: float
    batch: int
    micro_batch: int
    peak: float
    sequence_length: int
    prediction: Prediction | None
    kills: tuple[float, ...] = (0.42, 0.75)
    saves: int = 6
    held_out: float = 0.005
    settings: tuple[str, ...] = ("--model.preset=gpt2-124m", "--train.precision=bfloat16")

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return max(1, round(self.tokens / (self.batch * self.sequence_length)))

    @property
    def save_interval(self) -> int:
        """Steps between checkpoints."""
        return max(1, self.steps // self.saves)

    def kill_steps(self) -> list[int]:
        """Return the steps after which the run is killed; each lies behind a checkpoint, so that steps repeat."""
        return [max(2, round(self.steps * part)) for part in self.kills]

    def command_line(self, folder: Path, name: str = "run") -> list[str]:
        """Return the settings of `megascale train` for a run in `folder`."""
        warmup = max(1, self.steps // 20)
        return [
            f"--data.train={folder}/data/train",
            f"--data.valid={folder}/data/valid",
            f"--model.vocab_size={self.vocab_size}",
            f"--model.sequence_length={self.sequence_length}",
            f"--parallel.data={self.gpus}",
            f"--train.runs={folder}",
            f"--train.name={name}",
            f"--train.steps={self.steps}",
            f"--train.global_batch={self.batch}",
            f"--train.micro_batch={self.micro_batch}",
            f"--train.eval_interval={warmup}",
            f"--lr.peak={self.peak}",
            f"--lr.warmup_steps={warmup}",
            f"--checkpoint.interval={self.save_interval}",
            "--checkpoint.keep=1",
            "--kernels.deterministic=true",
            "--observe.progress=false",
            *self.settings,
        ]


# Three runs of 300 M tokens with 64 sequences per step ended at a held-out loss of 1.544 to 1.552, and passed 60 M
# tokens at 2.33 to 2.35 before the rate fell (dev/reports/float8-learning). The tokenizer of 32,768 entries has 3.8
# bytes per token in held-out Python source. An H100 trains 576,000 tokens/s at a micro-batch of 32 (dev/log.md);
# reproducible kernels cost 1 to 5%.
PLANS = {
    "four": OpenRunPlan(
        name="four",
        gpus=4,
        text_bytes=None,
        vocab_size=32768,
        tokens=6e8,
        batch=256,
        micro_batch=64,
        peak=6e-4,
        sequence_length=1024,
        prediction=Prediction(
            stated="2026-11-27",
            loss=(1.50, 1.42, 1.58),
            bits_per_byte=(0.57, 0.53, 0.61),
            seconds=(295.0, 265.0, 345.0),
            reason="1.55 after 300 M tokens; 576,000 tokens/s per H100, less 5% each for kernels and exchange",
        ),
    ),
    "one": OpenRunPlan(
        name="one",
        gpus=1,
        text_bytes=150_000_000,
        vocab_size=32768,
        tokens=5e7,
        batch=64,
        micro_batch=64,
        peak=4e-4,
        sequence_length=1024,
        prediction=Prediction(
            stated="2026-11-27",
            loss=(2.22, 2.08, 2.42),
            bits_per_byte=(0.84, 0.77, 0.93),
            seconds=(92.0, 80.0, 110.0),
            reason="2.4 at 50 M tokens of a run whose rate had not fallen; 576,000 tokens/s per H100, less 5%",
        ),
    ),
    "tiny": OpenRunPlan(
        name="tiny",
        gpus=1,
        text_bytes=400_000,
        vocab_size=512,
        tokens=30 * 4 * 32,
        batch=4,
        micro_batch=4,
        peak=1e-3,
        sequence_length=32,
        prediction=None,
        held_out=0.05,
        settings=(
            "--model.preset=tiny",
            "--model.layers=1",
            "--model.hidden=32",
            "--model.heads=2",
            "--train.device=cpu",
            "--train.threads=1",
        ),
    ),
}
