"""Training with parameter servers: channels, servers, workers."""
