"""Training state beside the weights, in checkpoint folders that any layout resumes."""
