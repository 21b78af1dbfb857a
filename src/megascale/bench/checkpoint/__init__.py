"""Benches of saving and loading."""
