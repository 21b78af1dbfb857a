"""`megascale bench`: measure training steps and kernels on this machine."""
