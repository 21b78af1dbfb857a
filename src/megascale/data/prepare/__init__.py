"""From text to a data set: documents, split, tokenizer, token files."""
