"""Telemetry: the messages of agents, the admission and loss of nodes, and the trainers' files."""
