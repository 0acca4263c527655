"""Works on gradients from the last backward pass of a step to its optimizer step: sums over ranks, norm, clipping."""
