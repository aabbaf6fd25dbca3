"""The web page: its files, the sessions of its readers, what it hears live, and one rollout as one file."""
