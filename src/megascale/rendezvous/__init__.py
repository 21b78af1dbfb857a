"""How processes find each other: stores, and the groups that the grid declares, made in order."""
