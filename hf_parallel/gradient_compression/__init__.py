"""What travels instead of gradients: codecs, exchanges, and the errors that are fed back."""
