"""The sequence of each row shared over ranks that hold the whole model: heads change places with it, or keys go round."""
