"""The network between hosts: switches, paths, sharing, packets, faults. No torch; numba for packets only."""
