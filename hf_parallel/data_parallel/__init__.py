"""Data parallelism: one flat gradient reducer and the optimizers and wires built on it."""
