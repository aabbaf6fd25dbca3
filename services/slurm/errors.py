"""What can go wrong with a service on Slurm."""

from __future__ import annotations


class SlurmError(RuntimeError):
    """Slurm, or a job of the service, did not do what was asked; the message says which, why, and the
    remedy."""
