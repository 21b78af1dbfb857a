"""Loaded first by the fork server (forked.py): collections during its imports take a fifth of their time.

frozen.py, which is loaded last, collects once and enables collections again.
"""

import gc

gc.disable()
