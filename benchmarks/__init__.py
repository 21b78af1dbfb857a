"""Benchmarks of MegaScale, run from a clone: `python -m benchmarks NAME`."""
