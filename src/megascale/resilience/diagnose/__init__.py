"""Self-checks of a node: does it compute what it should, as fast as its kind does, and do its links carry?

Kept light on purpose: a check that runs for minutes costs more than a fault it finds (MegaScale section 4.3).
"""
