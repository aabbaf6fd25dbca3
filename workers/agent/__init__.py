"""The agent loop: turns of model and tools, in token ids."""
