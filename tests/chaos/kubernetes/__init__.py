"""Faults of jobs on a real Kubernetes."""
