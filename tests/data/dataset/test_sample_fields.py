"""Optional fields of samples: read by the sample order, with defaults for files that lack them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.core.batch import SampleFields
from megascale.data.dataset.formats import FORMATS
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.token_file import TokenFile
from megascale.data.loader.host_plan import HostPlan
from megascale.errors import DataError
from tests.data.sample_sources import open_samples, plan_host_of

MAX_DOCUMENTS = 5


class FieldFile(TokenFile):
    """An .npz file with tokens, weights, positions and document starts."""

    def __init__(self, entry: str | Path) -> None:
        self.prefix = str(entry)
        self._arrays = dict(np.load(entry))
        self.tokens = len(self._arrays["tokens"])

    @property
    def stream(self) -> np.ndarray:
        return self._arrays["tokens"]

    @classmethod
    def files(cls, entry: str | Path) -> list[Path]:
        return [Path(entry)]

    @classmethod
    def fields(cls, entry: str | Path) -> SampleFields:
        return SampleFields(loss_weights=True, positions=True, max_documents=MAX_DOCUMENTS)

    @property
    def loss_weights(self) -> np.ndarray:
        return self._arrays["weights"]

    @property
    def positions(self) -> np.ndarray:
        return self._arrays["positions"]

    @property
    def document_starts(self) -> np.ndarray:
        return self._arrays["document_starts"]


@pytest.fixture(autouse=True)
def field_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "npz", FieldFile)


def write(file: Path, tokens: int, starts: list[int], **changes: np.ndarray) -> str:
    """Write a file whose weights are quarters of the token ids, and whose positions count from the last start."""
    numbers = np.arange(tokens)
    begin = np.searchsorted(starts, numbers, side="right")
    positions = numbers - np.concatenate([[0], starts])[begin]
    arrays = {"tokens": numbers, "weights": numbers / 4, "positions": positions, "document_starts": np.array(starts)}
    np.savez(file, **(arrays | changes))  # type: ignore[arg-type]
    return str(file)


def configured(train: list[str], length: int, **data: object) -> config.Config:
    tree = {"model": {"sequence_length": length, "vocab_size": None}, "data": {"train": train, **data}}
    return config.from_tree(tree)


@given(
    length=st.integers(2, 8),
    windows=st.integers(1, 9),
    documents=st.tuples(st.integers(1, 2), st.integers(2, 3)),
    first=st.integers(0, 20),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_fields_belong_to_their_tokens(
    tmp_path: Path, length: int, windows: int, documents: tuple[int, int], first: int
) -> None:
    tokens = windows * length + 1
    first_length, other_length = documents
    starts = [0] + list(range(first_length, tokens, min(length, other_length)))
    source = open_samples(configured([write(tmp_path / "t.npz", tokens, starts)], length))
    samples = source.read_samples(first, 5)
    assert samples.loss_weights is not None
    assert samples.positions is not None
    assert samples.document_boundaries is not None
    assert np.array_equal(samples.loss_weights, (samples.tokens[1:] / 4).astype(np.float32))
    assert source.sum_weights(first, 5) == samples.loss_weights.sum(dtype=np.float64)
    for column, boundaries in zip(samples.tokens[:-1].T, samples.document_boundaries.T, strict=True):
        inner = [start - column[0] for start in starts if column[0] < start <= column[-1]]
        padding = [length] * (MAX_DOCUMENTS - len(inner))
        assert boundaries.tolist() == [0] + inner + padding
    positions = np.array([token - max(start for start in starts if start <= token) for token in range(tokens)])
    assert np.array_equal(samples.positions, positions[samples.tokens[:-1]])


def test_a_file_without_fields_gets_defaults(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "plain", "uint16") as writer:
        writer.add(np.arange(41))
    train = [str(tmp_path / "plain"), write(tmp_path / "t.npz", 41, list(range(0, 41, 8)))]
    source = open_samples(configured(train, 8, weights=[1.0, 1.0], shuffle=False))
    files = source.find_sample_ids(0, 8)[:, 1]
    samples = source.read_samples(0, 8)
    assert samples.loss_weights is not None
    assert samples.positions is not None
    assert samples.document_boundaries is not None
    assert (samples.loss_weights[:, files == 0] == 1).all()
    assert (samples.positions[:, files == 0] == np.arange(8)[:, None]).all()
    assert ([0] + [8] * MAX_DOCUMENTS == samples.document_boundaries[:, files == 0].T).all()
    assert np.array_equal(samples.loss_weights[:, files == 1], samples.tokens[1:, files == 1] / np.float32(4))
    plain = open_samples(configured(train[:1], 8)).read_samples(0, 2)
    assert (plain.loss_weights, plain.positions, plain.document_boundaries) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.array([1.0] * 10 + [np.nan] * 7)}, "the loss weight of token 10 is nan"),
        ({"weights": np.array([1.0] * 16 + [-1.0])}, "the loss weight of token 16 is -1.0"),
        ({"positions": np.arange(17)}, "token 8 has position 8; positions must be 0 to"),
        ({"document_starts": np.arange(17)}, "has 8 documents, and its format declares at most 5"),
    ],
)
def test_values_that_a_field_may_not_have_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    source = open_samples(configured([write(tmp_path / "t.npz", 17, [0, 8], **changes)], 8, shuffle=False))
    with pytest.raises(DataError, match=message):
        source.read_samples(0, 2)


@pytest.mark.parametrize("stride", [None, 3])
def test_each_held_out_target_has_its_weight(tmp_path: Path, stride: int | None) -> None:
    held_out = HeldOut(write(tmp_path / "v.npz", 21, [0, 8, 16]), 8, stride=stride)
    batch = held_out.read_batch(range(held_out.windows), held_out.windows + 2)
    assert batch.loss_weights is not None
    assert batch.positions is not None
    assert batch.tokens is not None
    assert batch.targets is not None
    is_target = batch.targets >= 0
    assert np.array_equal(batch.loss_weights, np.where(is_target, batch.targets, 0) / np.float32(4))
    assert batch.loss_weights.sum() == np.arange(21).sum() / 4
    inputs = batch.tokens[is_target]
    assert np.array_equal(batch.positions[is_target], inputs % 8)


def test_a_plan_keeps_its_fields_and_every_stage_reads_what_blocks_need(tmp_path: Path) -> None:
    model = {"layers": 3, "heads": 2, "hidden": 8, "sequence_length": 8, "vocab_size": 64}
    data = {"train": [write(tmp_path / "t.npz", 200, [0])]}
    plan = plan_host_of(config.from_tree({"model": model, "data": data, "parallel": {"pipeline": 3}}), 3, 0, 3)
    assert HostPlan.from_json(plan.to_json()) == plan
    assert plan.shape.readers == ((0, 1, 2),)
