"""The parts of `examples/train.py`: what it learns from, how, and what it leaves on disk."""
