"""Clusters: devices and links by name, from files, and as found."""
