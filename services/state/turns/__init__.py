"""The turn log of an attempt: what RUN does, written as it is done, for another worker to go on with."""
