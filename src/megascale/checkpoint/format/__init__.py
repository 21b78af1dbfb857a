"""What a checkpoint consists of: files, chunks, index, commit; who writes and who reads which part."""
