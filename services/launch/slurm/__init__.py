"""The service on a Slurm cluster: a head job, and a job for each node that carries rollouts or LLM
servers."""
