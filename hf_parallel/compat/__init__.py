"""The only modules that touch private names of torch, transformers and accelerate."""
