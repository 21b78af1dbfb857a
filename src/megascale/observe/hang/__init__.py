"""The hang verdict: who waits for whom, in which collective, and which rank began it."""
