"""Every layout against the one-process run, in real processes over gloo."""
