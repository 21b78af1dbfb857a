"""The loader process of a host, which reads samples ahead into shared memory for all ranks of the host."""
