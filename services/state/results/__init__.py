"""What ended: the stream of results, acknowledgement, and how long trajectories are kept."""
