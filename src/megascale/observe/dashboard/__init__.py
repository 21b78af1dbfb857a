"""The dashboard of a run: a server that answers a browser from the run folder, and its pages."""
