"""What every part asks: grid, schedule, counts of FLOPs and memory, spans, events. Imports no torch."""
