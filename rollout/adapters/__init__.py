"""Rollouts in the records of trainers, one file a trainer; none imports its trainer. See docs/trainers.md."""
