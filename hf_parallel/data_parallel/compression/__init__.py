"""Gradient compression: codecs, error feedback and the collectives that carry codes."""
