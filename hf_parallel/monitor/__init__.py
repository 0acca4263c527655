"""Records what a rank does in each step and when, and sums it up afterwards."""
