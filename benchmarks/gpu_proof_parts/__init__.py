"""The steps of `make gpu-proof`, what runs them, and the card that they end in."""
