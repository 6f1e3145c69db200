"""What earlier searches found."""
