"""MegaScale: train large language models unattended, on one GPU or on many hosts."""

__version__ = "0.2.0.dev0"
