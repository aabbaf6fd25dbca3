"""One file a group of routes; each is a Flask blueprint."""
