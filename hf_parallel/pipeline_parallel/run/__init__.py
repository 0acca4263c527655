"""One rank executing its part of a schedule: stages, messages, weight gradients."""
