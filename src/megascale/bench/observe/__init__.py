"""Benches of what a run records of itself."""
