"""What recorded steps say: what-if, timelines."""
