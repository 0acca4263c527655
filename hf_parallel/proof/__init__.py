"""The proof on a user's own model: the same training steps in one process and in a layout, compared tensor by tensor."""
