"""Gradients between the backward pass and the optimizer step: what hooks, callbacks and losses of the user's see and change."""
