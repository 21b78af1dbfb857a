"""Analyses of recorded steps: slow machines, declines, what-if replays and timelines."""
