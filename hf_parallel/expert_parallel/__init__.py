"""The experts of each block on several replicas: each token travels to the rank that holds its expert, and back."""
