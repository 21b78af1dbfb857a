"""Self-checks of a node: correct results, usual speed, and working links (MegaScale section 4.3).

The checks are short, since a check that runs for minutes costs more time than the faults that it finds.
"""
