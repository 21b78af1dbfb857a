"""Newton-Schulz iteration: the orthogonal matrix next to a given one, by GEMMs alone.

Of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): the odd quintic a x + b x^3 + c x^5 on the
singular values, whose steep start takes small ones up in few steps; they end in about 0.7 to 1.2, not at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """x [k, m, n] with m <= n -> about U V^T of each matrix's singular value decomposition U S V^T; zero stays zero.

    GEMMs in x's own type, three batched launches a step; each matrix is first divided by its Frobenius norm.
    """
    if x.shape[-2] > x.shape[-1]:
        raise ValueError(f"matrices of {tuple(x.shape[-2:])} are tall: transpose them, so that x x^T is the small one")
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x
