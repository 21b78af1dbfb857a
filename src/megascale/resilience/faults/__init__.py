"""Faults on purpose, to see that a job recovers."""
