"""Load on one driver."""
