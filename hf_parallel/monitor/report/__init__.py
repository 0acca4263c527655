"""Evaluates the records of all ranks, beside what was planned: metrics, slow ranks, a trace, a page."""
