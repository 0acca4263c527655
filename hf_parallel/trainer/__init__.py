"""The stock Trainer and Accelerator on a mesh: callback, plugin, Trainer class."""
