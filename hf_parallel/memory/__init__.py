"""What a run needs of a GPU and of the RAM, term by term."""
