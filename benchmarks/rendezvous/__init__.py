"""Start-up of thousands of ranks."""
