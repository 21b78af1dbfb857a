"""Benches: one module each, prints a table and writes JSON."""
