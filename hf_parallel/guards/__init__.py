"""Notices what user code does to weights, gradients and batches, and between which moments it may."""
