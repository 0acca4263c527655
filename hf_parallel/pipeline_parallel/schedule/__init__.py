"""Pipeline schedules as data: generated, checked, simulated and drawn."""
