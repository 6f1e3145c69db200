"""Measured times of ops and collectives: how they are taken, kept, and looked up."""
