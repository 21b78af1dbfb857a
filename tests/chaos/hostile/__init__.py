"""Attacks on a job by a stranger."""
