"""What a rank does in each step and when: recorded while it trains, summed up afterwards."""
