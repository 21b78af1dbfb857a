"""`megascale bench kernels`: errors and times of single operators."""
