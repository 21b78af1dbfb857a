"""The training loop, evaluation, generation, and starting processes."""
