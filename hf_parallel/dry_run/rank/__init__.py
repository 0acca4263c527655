"""One rank's training step on fake tensors: what memory it takes, what it sends, where the host waits."""
