"""Training checkpoints: tensors as pieces of whole ones, written by torch's DCP, in folders with one commit point."""
