"""Recovery: what follows from verdicts, on which nodes, with which settings, in which attempt."""
