"""Captured model calls in Redis: a session an attempt, and the tree of its turns."""
