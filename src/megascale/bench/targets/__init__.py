"""The figures that this project holds itself to."""
