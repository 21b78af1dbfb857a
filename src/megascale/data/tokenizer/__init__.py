"""Tokenizers, and the files that they come from."""
