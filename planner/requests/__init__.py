"""Requests of users: goals, limits, pins, and their errors."""
