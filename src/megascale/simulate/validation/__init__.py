"""Validation of the simulator: one module per kind of measured steps."""
