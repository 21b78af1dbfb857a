"""Clusters, which provide the nodes of a job: this machine, ssh, Slurm, Kubernetes, or agents that join."""
