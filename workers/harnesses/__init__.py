"""Programs that drive a rollout's turns in place of our own loop: how each is started in a sandbox."""
