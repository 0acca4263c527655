"""Tensor parallelism on plain local tensors: layouts, a verified plan for any model, and its application in place."""
