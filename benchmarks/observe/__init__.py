"""Spans, timers, diagnosis and the dashboard."""
