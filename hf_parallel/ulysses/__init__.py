"""The sequence of each row shared over ranks that hold the whole model: heads and sequence change places in attention."""
