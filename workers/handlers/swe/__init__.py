"""`swe`: fix issues in real repositories. Rows of data sets in `rows`, how they run in `specs`, INIT in
`repository`, what the agent changed in `patches` and `protection`, EVAL in `evaluation` and `recording`.
"""

from workers.handlers.swe.handler import Swe

__all__ = ["Swe"]
