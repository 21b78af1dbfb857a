"""Soaks of models from elsewhere."""
