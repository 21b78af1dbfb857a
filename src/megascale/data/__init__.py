"""Data of a run: token files, samples, tokenizers, builds of data sets, and the loader of a host."""
