"""Checks before anything is started: settings, machine, memory."""
