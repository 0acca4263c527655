"""From the last backward pass of a step to its optimizer step: sums over ranks, the norm of the model, what a rank may step by itself."""
