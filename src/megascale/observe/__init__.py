"""Metrics, plots, timers and what explains a run to a person."""
