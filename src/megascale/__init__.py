"""MegaScale: train large language models at any scale, unattended."""

__version__ = "0.1.0"
