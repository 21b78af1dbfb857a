"""Training steps, layouts, kernels' overlap, and peers."""
