"""MegaScale: train large language models unattended, on one GPU or on many hosts."""

__version__ = "0.1.0"
