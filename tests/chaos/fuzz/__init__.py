"""Damaged files and frames for every reader."""
