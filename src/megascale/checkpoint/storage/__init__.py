"""Where checkpoints lie: a mounted folder or any fsspec URL."""
