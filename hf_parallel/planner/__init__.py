"""What a layout costs before anything is rented: memory, step time, and which layout of a cluster is the fastest."""
