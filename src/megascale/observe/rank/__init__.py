"""Measurements inside a trainer: timers on its device or its CPU, and the link that takes them out without waiting."""
