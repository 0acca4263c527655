"""What `model.forward` becomes: the model's own on one stage, a schedule on several."""
