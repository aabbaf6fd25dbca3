"""Model calls of programs that know nothing of us: their dialects, and a tree of turns a rollout."""
