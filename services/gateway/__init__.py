"""The HTTP gateway (Flask). It sends stage tasks by name and imports no worker code."""
