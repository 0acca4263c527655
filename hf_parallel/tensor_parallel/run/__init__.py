"""Runs sharded layers: local products, collectives, the vocabulary-parallel loss."""
