"""Facts that all packages share: grid, schedules, counts of FLOPs and memory, spans, events, files. No torch."""
