"""What goes into the model and what comes out: batches, outputs, losses, and code of users that computes with modules."""
