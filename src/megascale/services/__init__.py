"""Connections and messages between the processes of a job, and the life cycle of a host's services."""
