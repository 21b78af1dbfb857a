"""What agents send, and what follows from it: nodes adopted or lost, verdicts acted upon."""
