"""Checkpoints as logical tensors: written whole or not at all, loaded on any layout."""
