"""Start of a job: the store through which its ranks meet, the comparison of settings, and the process groups."""
