"""Token files and text files, their samples, and the order of the samples."""
