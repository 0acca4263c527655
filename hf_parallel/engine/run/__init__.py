"""Replaces `model.forward`: by the model's own, with reduction, on one stage, by a schedule on several."""
