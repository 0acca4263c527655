"""What a parallel Trainer does in another way than the stock one: its steps, its saves, its checkpoints."""
