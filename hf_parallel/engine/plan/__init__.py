"""What is found out about a whole model before it is changed, and remembered for the next start."""
