"""Builds of data sets: documents, split, tokenizer, token files."""
