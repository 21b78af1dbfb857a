"""The protocol of driver and agents: messages, the channel they go over, and how both ends find each other."""
