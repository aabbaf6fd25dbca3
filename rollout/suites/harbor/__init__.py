"""Tasks in the format of Harbor: directories with a `task.toml`, read as Harbor 0.25 reads them."""
