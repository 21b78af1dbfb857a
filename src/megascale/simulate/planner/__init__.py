"""What a layout costs before a GPU is rented."""
