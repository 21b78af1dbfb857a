"""What a rank runs with is its engine's: two engines of one process never meet."""

from __future__ import annotations

from megascale.core.calls import NoCalls
from tests.exact.cases import case
from tests.exact.training import Late, Told, make_engine, run_step


class Log(NoCalls):
    """Notes where its engine stands."""

    def __init__(self) -> None:
        self.places: list[bytes] = []

    def at(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        self.places.append(action)


def test_engines_of_one_process_share_nothing():
    tree = case(microbatches=1, model={"layers": 1}).tree
    first, second = make_engine(0, 1, tree), make_engine(0, 1, {**tree, "kernels": {"attention": "sdpa"}})
    first.runtime.calls, first.runtime.stream = Log(), Late()
    told = [Told(), Told()]
    for engine, one in zip((second, first), told, strict=True):
        run_step(engine, 1, one)
    assert first.runtime.calls.places[-1] == b"optimizer"
    assert type(second.runtime.calls) is NoCalls
    assert not first.runtime.stream.open
    assert not second.runtime.attention.describe()
    assert len(first.runtime.attention.describe()) == 1  # the other was told which kernel to run
    assert told[0].losses == told[1].losses
    assert told[0].norms == told[1].norms
    chunk = first.chunks[0]
    assert chunk.linears.axis.runtime is first.runtime is first.data.flats[0].axes.tensor.runtime
