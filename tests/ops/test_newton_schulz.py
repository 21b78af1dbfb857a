"""Newton-Schulz: the same singular vectors, singular values near one, whatever the scale; zero and tall matrices."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.newton_schulz import newton_schulz


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_singular_values_come_near_one_and_vectors_stay(scale):
    draw = torch.Generator().manual_seed(3)
    x = scale * torch.randn(3, 24, 40, dtype=torch.float64, generator=draw)
    result = newton_schulz(x, 5)
    remaining, _, right = torch.linalg.svd(x, full_matrices=False)
    inner = remaining.mT @ result @ right.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert (values > 0.6).all()
    assert (values < 1.3).all()
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-9)
    one_by_one = torch.cat([newton_schulz(item[None], 5) for item in x])
    torch.testing.assert_close(result, one_by_one, rtol=1e-12, atol=1e-14)


def test_zero_is_left_zero_and_tall_ones_are_refused():
    assert not newton_schulz(torch.zeros(1, 2, 3), 5).any()
    with pytest.raises(ValueError, match="transpose"):
        newton_schulz(torch.zeros(1, 3, 2), 5)
