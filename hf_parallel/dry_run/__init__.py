"""What can be said before anything is started: settings, machine, memory."""
