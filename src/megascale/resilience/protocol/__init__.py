"""The protocol between driver and agents: message types, the authenticated channel, and files with addresses."""
