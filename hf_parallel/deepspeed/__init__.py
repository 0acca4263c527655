"""DeepSpeed's settings: the keys it knows and the rules it does not enforce."""
