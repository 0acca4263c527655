"""Optimizers of the user's: what their step reads, keeps and changes."""
