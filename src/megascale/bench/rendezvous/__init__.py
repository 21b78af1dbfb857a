"""Benches of how thousands of ranks meet."""
