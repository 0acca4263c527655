"""Weights and training state, to and from files, whatever the layout."""
