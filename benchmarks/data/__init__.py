"""The data loader and the tokenizer."""
