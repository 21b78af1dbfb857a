"""Faults of jobs on this machine."""
