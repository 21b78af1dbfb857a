"""Muon's Newton-Schulz iteration, which orthogonalises matrices by GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor

# Coefficients of the Newton-Schulz iteration a x + b x^3 + c x^5 (Jordan et al. 2024).
NEWTON_SCHULZ_A = 3.4445

NEWTON_SCHULZ_B = -4.7750

NEWTON_SCHULZ_C = 2.0315


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T (singular value decomposition). A zero matrix stays zero.

    Each step applies a x + b x^3 + c x^5 to the singular values by three batched GEMMs in x's type (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/). These coefficients raise small singular values in few steps, which end
    between about 0.7 and 1.2 instead of at 1.

    Args:
        x: matrices [k, m, n] with m <= n.

    Raises ValueError if m > n.
    """
    if x.shape[-2] > x.shape[-1]:
        raise ValueError(f"matrices of {tuple(x.shape[-2:])} are tall: transpose them, so that x x^T is the small one")
    # Divide by the Frobenius norm, so that no singular value exceeds 1.
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=NEWTON_SCHULZ_B, alpha=NEWTON_SCHULZ_C)
        x = torch.baddbmm(x, polynomial, x, beta=NEWTON_SCHULZ_A)
    return x
