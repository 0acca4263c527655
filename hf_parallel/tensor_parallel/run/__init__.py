"""What sharded layers do at run time: local products, collectives, the vocabulary-parallel loss."""
