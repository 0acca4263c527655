"""What training carries from step to step beside the weights, in checkpoint folders that any layout resumes."""
