"""Faults of jobs under a real Slurm."""
