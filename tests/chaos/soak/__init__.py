"""Random cases by the hundred."""
