"""Spans and roll-ups outside the trainers: their binary form, spool, files and queries. No torch."""
