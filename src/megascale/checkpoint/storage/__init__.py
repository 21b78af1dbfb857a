"""Storage of checkpoints: a mounted folder or any fsspec URL."""
