"""Attacks on saving."""
