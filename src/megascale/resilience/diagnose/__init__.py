"""Self-checks of a node: correct results, usual speed, and working links (MegaScale section 4.3).

The checks are short on purpose: a check that runs for minutes costs more than the faults it finds.
"""
