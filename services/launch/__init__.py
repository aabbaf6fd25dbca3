"""What starts the service and keeps it up: on one machine (`rollout up`), or on a Slurm cluster."""


class StackError(RuntimeError):
    """The stack cannot be started, or a part of it did not start; the message says which and why."""


class SlurmError(RuntimeError):
    """Slurm, or a job of the service, did not do what was asked; the message says which, why, and the
    remedy."""
