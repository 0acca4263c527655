"""Where a model can be cut, what each stage costs, and the proof that the stages equal the whole."""
