"""What ended: the stream of completions, acknowledgement, and how long trajectories are kept."""
