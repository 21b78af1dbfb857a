"""Benches of building data sets and reading them."""
