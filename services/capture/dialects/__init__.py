"""The dialects: one file each, which translates both ways and says what it refuses."""
