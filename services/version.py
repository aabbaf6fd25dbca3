"""What processes of two releases must agree on when they share a Redis."""

STAMP = 2
"""Of messages, records and scripts: raised by each release that changes what one of them means. Releases work
side by side whose stamps are neighbours. 1: up to 0.2; 2: turn logs, RUN is taken over."""
