"""One page for a whole run: what a browser asks of a run folder, alive or dead, and the pages that show it."""
