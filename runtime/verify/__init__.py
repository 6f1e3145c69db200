"""Steps of a plan compared with steps of one device."""
