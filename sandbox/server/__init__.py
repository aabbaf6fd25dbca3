"""Runs inside the container: standard library and ptyprocess only, any Python from 3.7 on.

The files are copied next to each other (`sandbox/payload.py`), so they import one another by bare name.
"""
