"""Tensor, pipeline and data parallelism: functions and buffers that take process groups as arguments."""
