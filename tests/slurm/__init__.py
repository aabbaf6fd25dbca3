"""The service on a virtual Slurm cluster: real Slurm daemons, every node on this machine."""
