"""Saving in the background: snapshots in host memory, the service that owns them, and replicas on other hosts."""
