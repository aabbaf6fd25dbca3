"""Long runs under faults. Each is a module with a short form that CI runs; `make soak` runs them whole."""
