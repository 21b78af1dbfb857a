"""Benches of finding faults and recovering from them."""
