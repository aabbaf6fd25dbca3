"""The whole service on one machine as plain child processes: no root, no containers, no daemons left."""
