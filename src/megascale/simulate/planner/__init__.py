"""Cost of a layout before a GPU is rented."""
