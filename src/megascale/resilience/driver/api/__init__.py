"""The driver's HTTP API: routes, what strangers may cost it, its TLS and tokens, and who asks it."""
