"""3D parallel training for any `AutoModelForCausalLM` inside a stock `transformers.Trainer`."""
