"""Benches of training steps, layouts and learning."""
