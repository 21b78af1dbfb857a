"""Messages between a job's processes, and the life cycle of a host's services."""
