"""Examines a whole model before it is changed, and remembers the results for the next start."""
