"""What every service of a host and the agents of a job share: one form of message, one way to start, meet and end."""
