"""Rollouts: their records, and the only way in which these change their state."""
