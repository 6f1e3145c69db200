"""The parts of a global batch that ranks read, in every variant of the step."""
