"""Hangs and lost ranks: each rank tells what it does, and a thread ends a job that waits too long, with the rank that holds it up."""
