"""MegaScale: train large language models at any scale with nobody watching."""

__version__ = "0.1.0"
