"""What a plan costs: seconds, bytes, and where each number came from."""
