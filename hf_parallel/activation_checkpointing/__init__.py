"""Blocks that run again during the backward pass: which, what is kept, what waits in host memory."""
