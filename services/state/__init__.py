"""Everything kept in Redis: one structure a file, its Lua beside it in `lua/`."""
