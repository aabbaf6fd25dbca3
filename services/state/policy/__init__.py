"""The policy: which weights are current, and the one update that may be under way."""
