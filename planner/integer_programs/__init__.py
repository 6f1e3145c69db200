"""Integer programs: how they are built and solved."""
