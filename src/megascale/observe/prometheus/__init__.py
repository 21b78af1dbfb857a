"""What Prometheus reads: the text format, and the rules, alerts and dashboard that are shipped (`*.yml`, `*.json`)."""
