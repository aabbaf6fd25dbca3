"""Batches: groups of rollouts, filtered, refilled and carried over."""
