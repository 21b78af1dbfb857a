"""What a driver must remember: the state of the job, the table of what may change it, and the journal."""
