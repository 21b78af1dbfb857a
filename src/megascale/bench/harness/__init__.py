"""What benches share: whole runs, timing, what a GPU and /proc tell; and the soak."""
