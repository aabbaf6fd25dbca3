"""Handlers and what they are written with, without the service around them."""
