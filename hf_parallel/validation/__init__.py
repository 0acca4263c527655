"""What is wrong with a configuration file, found before anything is launched."""
