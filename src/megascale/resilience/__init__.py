"""Driver, agents, diagnostics and recovery. Starts trainers as processes, never imports them."""
