"""Tokens on disk, tokenizers, the builder, sample order and the host loader."""
