"""Real servers for tests, and the handlers they run."""
