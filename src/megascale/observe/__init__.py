"""Metrics, plots, timers and analyses of a run."""
