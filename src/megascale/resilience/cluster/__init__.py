"""Where nodes come from: one interface, local processes or Kubernetes behind it."""
