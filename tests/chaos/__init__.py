"""Parts of a running service are killed, frozen and cut off; then every rollout is counted.

In CI each test runs in a short form; `CHAOS_LONG=1` (`make chaos`) runs it whole.
"""
