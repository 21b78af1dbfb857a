"""Faults of machines, as network namespaces."""
