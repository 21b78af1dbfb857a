"""The driver's own process: its garbage, its descriptors, what runs on its loop."""
