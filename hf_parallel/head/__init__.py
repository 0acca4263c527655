"""Logits that are made when they are read, and a loss that does without them."""
