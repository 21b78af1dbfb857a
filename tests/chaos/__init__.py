"""Campaigns that break real jobs: `python -m tests.chaos NAME`."""
