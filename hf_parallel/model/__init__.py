"""Examines any model before anything is planned: its stack of blocks, one recorded forward, samples."""
