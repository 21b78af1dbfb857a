"""The file format of checkpoints: chunks, their index, the commit, and the plans of who writes and reads which."""
