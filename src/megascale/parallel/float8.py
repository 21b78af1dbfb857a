"""Linear layers in float8: `train.linear_precision` = "float8" (tensor-wise scales) or "float8_rowwise".

All three GEMMs of attention and MLP matrices; embedding, norms, attention and logits stay in `train.precision`.
Activations and weights are E4M3; gradients are E5M2, row-wise E4M3 as torchao has them. Scales are those of the tensor
at hand ("current"): nothing has to be remembered, saved or replayed, and what backward recomputes is cast as forward
cast it. Weights are cast once a step, by their first reader.

Tensor-wise, ranks that share a tensor agree on its largest magnitude, so that numbers do not depend on the layout; what
tensor parallelism gathers travels as bytes, half of bfloat16's, and is transposed on arrival, and so are weights that
data-parallel ranks gather as bytes (parallel/float8_gather.py) instead of having each rank cast them. What backward
keeps of an activation is its transposed float8 copy, half of what bfloat16 would keep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megascale.errors import ConfigError, TrainingError
from megascale.ops import dispatch, known_amax
from megascale.ops.float8 import gemm
from megascale.ops.float8.cast import amax_of, cast_by_amax, cast_rows
from megascale.ops.float8.formats import E4M3, E5M2, Float8, Format
from megascale.ops.float8.shards import transposed
from megascale.ops.linear import Gemms, Operand, flat
from megascale.parallel.collectives import ALONE, Axis, largest_magnitude
from megascale.parallel.linear_precision import LinearPrecision


class _Float8Linears(LinearPrecision, ABC):
    """What the recipes share: weights cast once a step, logits as without float8, checks at the start.

    Only activations and gradients are counted, weights are not.
    """

    recipe = ""
    of_gradients = E4M3

    def __init__(self, axis: Axis = ALONE) -> None:
        super().__init__(axis)
        self._logits = LinearPrecision(axis)
        self._weights: dict[int, tuple[Tensor, Float8]] = {}
        self._placed: dict[int, Float8] = {}
        self._counts: Tensor | None = None
        self._counting = False
        self._looked_at = 0

    @property
    def logits(self) -> Gemms:
        """See LinearPrecision."""
        return self._logits

    def weights_changed(self) -> None:
        """See LinearPrecision."""
        self._weights.clear()

    def prepare(self, weights: Iterable[Tensor]) -> None:
        """See LinearPrecision."""
        for weight in weights:
            self.weight(weight)

    def place_weights(self, weights: Iterable[Tensor]) -> None:
        """See LinearPrecision."""
        for weight in weights:
            made = self.weight(weight)
            placed = self._placed.setdefault(id(weight), made)
            if placed is not made:
                for name, to in vars(placed).items():
                    if to is not None and to is not (new := getattr(made, name)):
                        to.copy_(new)
                self._weights[id(weight)] = weight, placed

    def check(self, matrices: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
        """See LinearPrecision."""
        dispatch.note("linear layers", f"float8, {self.recipe}: {len(matrices)} matrices; embedding and logits are not")
        if device.type != "cuda":
            return
        gemm.check_device(device)
        for name, weight in matrices.items():
            if weight.dtype != torch.bfloat16:
                raise ConfigError(
                    f"train.linear_precision='float8' computes all else in bfloat16 on a GPU, and train.precision is "
                    f"{str(weight.dtype).removeprefix('torch.')}; set --train.precision=bfloat16 or "
                    "--train.linear_precision=default"
                )
            gemm.check_shape(name, tokens, weight.shape[1], weight.shape[0])

    def weight(self, weight: Tensor) -> Float8:
        """A weight [O, I] in float8, both ways round, as it is since `weights_changed`."""
        known = self._weights.get(id(weight))
        if known is None:
            known = self._weights[id(weight)] = weight, self._made(weight)
        return known[1]

    def _made(self, weight: Tensor) -> Float8:
        """See `weight`, when nothing is known of it yet."""
        return self.cast_weight(weight.detach())

    @abstractmethod
    def cast_weight(self, weight: Tensor) -> Float8:
        """See `weight`."""

    @abstractmethod
    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        """An operand's float8 rows [rows, N], of `kind`, and their scale or scales."""

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """See Gemms."""
        w = self.weight(weight)
        return self._multiply(x, E4M3, w.rows, w.rows_scale, weight.dtype, out, add, fast=True, bias=bias)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """See Gemms."""
        w = self.weight(weight)
        return self._multiply(dy, self.of_gradients, w.columns, w.columns_scale, weight.dtype, out, add)

    def _multiply(
        self,
        x: Operand,
        kind: Format,
        w: Tensor | None,
        w_scale: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
        add: bool,
        fast: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x @ w.T, into out if that is given."""
        assert w is not None
        assert w_scale is not None
        rows, scale = self.rows(x, kind)
        if out is None:
            y = gemm.matmul(rows, scale, w, w_scale, dtype=dtype, fast=fast, bias=bias)
            return y.view(*x[0].shape[:-1], -1)
        return gemm.matmul_out(flat(out), rows, scale, w, w_scale, fast=fast, bias=bias, add=add)

    def count_casts(self, on: bool) -> None:
        """See LinearPrecision."""
        self._counting, self._counts, self._looked_at = on, None, 0

    def counted(self) -> Tensor | None:
        """See LinearPrecision."""
        if self._counts is None:
            return None
        found = torch.zeros(3, dtype=torch.float64, device=self._counts.device)
        found[:2] += self._counts
        found[2] = self._looked_at
        return found

    def _counts_for(self, x: Tensor) -> Tensor | None:
        """Where a cast of x adds to: int64 [2]."""
        if not self._counting:
            return None
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=x.device)
        self._looked_at += x.numel()
        return self._counts


class TensorWiseFloat8(_Float8Linears):
    """One scale a matrix, from its own largest magnitude.

    An operand here is (rows, scale, columns): float8 [..., N], float32 [], float8 [N, rows]. One that is going to be
    gathered has no columns, and rows as bytes; `gathered` makes the columns of all. Backward keeps (columns, scale).
    """

    recipe = "one scale a matrix"
    of_gradients = E5M2
    wants_amaxes = True

    def __init__(self, axis: Axis = ALONE) -> None:
        super().__init__(axis)
        # Rows and scale of weights that are gathered; None while neither they nor the weight are whole on this rank.
        self._arrived: dict[int, tuple[Tensor, Tensor] | None] = {}

    def rows_arrived(self, weight: Tensor, rows: Tensor, scale: Tensor) -> None:
        """The weight [O, I] is read as these rows (E4M3) and scale from now on, in place of being cast.

        They must lie where they lay the time before: what CUDA graphs read is then there without a copy.
        """
        self._arrived[id(weight)] = rows, scale
        self._weights.pop(id(weight), None)

    def rows_outdated(self, weight: Tensor) -> None:
        """Ranks have updated their parts of the weight: reading it is an error until it has been gathered."""
        self._arrived[id(weight)] = None
        self._weights.pop(id(weight), None)

    def weight_whole(self, weight: Tensor) -> None:
        """The weight itself has been gathered: where no rows have arrived it is cast."""
        if self._arrived.get(id(weight)) is None:
            self._arrived.pop(id(weight), None)

    def _made(self, weight: Tensor) -> Float8:
        if id(weight) not in self._arrived:
            return super()._made(weight)
        arrived = self._arrived[id(weight)]
        if arrived is None:
            raise TrainingError(
                f"a weight {list(weight.shape)} is read after its update and before it was gathered; call "
                "Engine.start_gather before a step, Engine.whole before anything else"
            )
        (rows, scale), placed = arrived, self._placed.get(id(weight))
        if placed is None or placed.rows is not rows or placed.columns is None:
            return Float8(rows, scale, transposed(rows), scale)
        transposed(rows, placed.columns)
        return placed

    def cast_weight(self, weight: Tensor) -> Float8:
        """See `weight`."""
        return cast_by_amax(weight, E4M3, largest_magnitude(amax_of(weight), self.axis))

    def _operand(self, x: Tensor, kind: Format, given: Tensor | None, travels: bool) -> Operand:
        given = known_amax.attached_amax(x) if given is None else given
        x = x.detach()
        amax = largest_magnitude(amax_of(x) if given is None else given, self.axis)
        travels = travels and self.axis.size > 1
        q = cast_by_amax(x, kind, amax, columns=not travels, counts=self._counts_for(x))
        assert q.rows is not None
        assert q.rows_scale is not None
        rows = q.rows.view(x.shape)
        if travels:
            return rows.view(torch.uint8), q.rows_scale
        assert q.columns is not None
        return rows, q.rows_scale, q.columns

    def input(self, x: Tensor, weight: Tensor, given: Tensor | None = None, travels: bool = False) -> Operand:
        """See Gemms. given: x's largest magnitude, float32 []."""
        return self._operand(x, E4M3, given, travels)

    def gradient(self, dy: Tensor, weight: Tensor, travels: bool = False) -> Operand:
        """See Gemms."""
        return self._operand(dy, E5M2, None, travels)

    def gathered(self, x: Operand) -> Operand:
        """See LinearPrecision."""
        if len(x) == 3 or x[0].dtype != torch.uint8:
            return x
        return x[0], x[1], transposed(flat(x[0]))

    def keep(self, x: Operand) -> Operand:
        """See LinearPrecision."""
        return (x[2], x[1]) if len(x) == 3 else x

    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        """See above."""
        return flat(x[0]).view(kind.dtype), x[1]

    def accumulate(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """See Gemms."""
        columns = x[2] if len(x) == 3 else x[0]
        gemm.matmul_into(main, dy[2].view(E5M2.dtype), dy[1], columns.view(E4M3.dtype), x[1], unset=overwrite)


class RowWiseFloat8(_Float8Linears):
    """A scale, a power of two, for each row that a GEMM reads; weight gradients stay in bfloat16.

    An operand is (x, rows, scales): as it came, float8 [rows, N], float32 [rows, 1]. Backward keeps x.
    """

    recipe = "a scale a row, weight gradients in train.precision"

    def check(self, matrices: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
        """See LinearPrecision."""
        if self.axis.size > 1:
            raise ConfigError(
                f"train.linear_precision='float8_rowwise' has no tensor parallelism, and parallel.tensor is "
                f"{self.axis.size}: a row cut over ranks would need its scale agreed among them; set "
                "--train.linear_precision=float8 or --parallel.tensor=1"
            )
        super().check(matrices, tokens, device)

    def cast_weight(self, weight: Tensor) -> Float8:
        """See `weight`."""
        return cast_rows(weight, E4M3, columns=True)

    def _operand(self, x: Tensor) -> Operand:
        x = x.detach()
        q = cast_rows(x, E4M3, counts=self._counts_for(x))
        assert q.rows is not None
        assert q.rows_scale is not None
        return x, q.rows, q.rows_scale

    def input(self, x: Tensor, weight: Tensor, given: object = None, travels: bool = False) -> Operand:
        """See Gemms."""
        return self._operand(x)

    def gradient(self, dy: Tensor, weight: Tensor, travels: bool = False) -> Operand:
        """See Gemms."""
        return self._operand(dy)

    def keep(self, x: Operand) -> Operand:
        """See LinearPrecision."""
        return x[:1]

    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        """See above."""
        return x[1], x[2]

    def accumulate(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """See Gemms."""
        super().accumulate(main, dy[:1], x[:1], overwrite)
