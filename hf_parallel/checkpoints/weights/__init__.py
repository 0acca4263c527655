"""Model weights in safetensors files: read slice by slice, written tensor by tensor."""
