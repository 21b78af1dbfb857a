"""Optimizers on flat shards and learning-rate schedules."""
