"""LLM backends: who they are, how loaded they are, and which rollout is pinned to which."""
