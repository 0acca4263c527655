"""The machine a run starts on: its facts, and what the doctor says about them."""
