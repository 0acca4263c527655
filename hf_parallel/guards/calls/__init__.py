"""Watches calls of the model: batches, outputs, losses, and code of users that computes with modules."""
