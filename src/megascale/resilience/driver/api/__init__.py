"""The driver's HTTP API: routes, limits, TLS and tokens, and the client that commands use."""
