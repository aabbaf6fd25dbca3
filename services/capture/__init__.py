"""Model calls of programs that know nothing of us: the dialects that they speak, and a tree of turns a rollout."""
