"""Estimates the memory of a run, on a GPU and in RAM, term by term."""
