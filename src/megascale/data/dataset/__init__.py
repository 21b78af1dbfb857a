"""Data sets as they lie on disk, and the order in which their samples come."""
