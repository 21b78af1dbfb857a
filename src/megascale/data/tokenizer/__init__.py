"""Tokenizers, read from files or trained."""
