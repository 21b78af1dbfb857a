"""The agent of a node: starts trainers, watches them, reports to the driver."""
