"""`harbor`: task directories of the Harbor format, each with an image, tests and perhaps a solution."""

from workers.handlers.harbor.handler import Harbor

__all__ = ["Harbor"]
