"""Where nodes come from: one interface; behind it local processes, a list of hosts, agents that come by themselves."""
