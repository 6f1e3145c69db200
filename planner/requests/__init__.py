"""What a user asks for: goals, limits, pins, and what is said where nothing fits."""
