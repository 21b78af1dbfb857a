"""How well the simulator predicts: one module a kind of anchor, `report` runs them all."""
