"""Saving in the background: a snapshot in host memory, the service that owns it, copies on other hosts."""
