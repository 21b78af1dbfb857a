"""Attacks on the data loader."""
