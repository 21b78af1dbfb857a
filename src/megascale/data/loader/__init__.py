"""One loader a host: it reads ahead into shared memory for all ranks."""
