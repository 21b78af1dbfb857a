"""Helpers that benchmarks and chaos campaigns share."""
