"""Weights and buffers: whatever user code does to them, all ranks go on with one model."""
