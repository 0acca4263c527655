"""Every setting: its schema, the rules that bind settings together, recipes, and how they reach a worker."""
