"""What a rank reads of a global batch, in every variant of the step."""
