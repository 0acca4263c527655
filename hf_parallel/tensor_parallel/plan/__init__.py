"""Derive and verify which dim of which parameter each tensor-parallel rank stores."""
