"""Each module without an underscore prints one JSON object as its last line: `python -m benchmarks.NAME`."""
