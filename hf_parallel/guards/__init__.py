"""Who may touch what, between which moments: what user code does to weights, gradients and batches is noticed here."""
