"""The step simulator. Imports no torch."""
