"""The command line, `hf-parallel`: one module for each command."""
