"""Operators: fused kernels and their plain PyTorch references, one file each."""
