"""Targets: what the project must reach, next to what was predicted."""
