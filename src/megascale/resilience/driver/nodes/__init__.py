"""The nodes of a job as the driver knows them, where their agents come in, and what they send of files."""
