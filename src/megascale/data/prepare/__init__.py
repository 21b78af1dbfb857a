"""Builds of data sets from text or conversations: split, tokenizer, token files."""
