"""Fault injection into a running job."""
