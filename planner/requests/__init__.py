"""Requests of users: goals, limits, pins, and the errors of requests that cannot be met."""
