"""What was seen, put together and judged by the rules: who is to blame, and for what."""
