"""One model, one rank: planned, cut, sharded and trained."""
