"""Measured figures that the simulator is held against, each file with its sources."""
