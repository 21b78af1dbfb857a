"""File format of checkpoints: chunks, index, commit, and the plans of which process writes and reads which chunk."""
