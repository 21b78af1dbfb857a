"""Diagnosis: the observations of the driver, and the rules that judge them."""
