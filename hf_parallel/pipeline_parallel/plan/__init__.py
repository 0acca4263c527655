"""Plans stages: the possible cuts of a model, the cost of each stage, and the proof that the stages equal the whole."""
