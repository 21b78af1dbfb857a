"""One runner and one report for faults on every site: local, machines, Slurm and Kubernetes."""
