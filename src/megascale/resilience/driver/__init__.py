"""The driver of a job: one loop that watches nodes, decides by rules, recovers, and writes down why."""
