"""What is done about faults: which recovery action, on which nodes, with which settings, in which attempt."""
