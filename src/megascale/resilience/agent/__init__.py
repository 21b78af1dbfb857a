"""Agent of a node: it starts the trainers, observes them and reports to the driver."""
