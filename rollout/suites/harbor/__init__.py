"""Tasks in the format of Harbor: directories with a `task.toml`, read as Harbor 0.25 reads them."""

from rollout.suites.harbor.dataset import HarborTask, requests, tasks

__all__ = ["HarborTask", "requests", "tasks"]
