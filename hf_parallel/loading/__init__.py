"""Models in and out of safetensors files without ever being whole in memory."""
