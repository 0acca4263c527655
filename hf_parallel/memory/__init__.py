"""What a run needs of a GPU and of a node's RAM: the numbers of a model, the arithmetic, the report."""
