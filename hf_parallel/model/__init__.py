"""What is found out about any model before anything is planned: its stack of blocks, one recorded forward, samples."""
