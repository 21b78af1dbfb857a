"""Operators: a fused kernel beside its plain PyTorch reference, one file each."""
