"""Schedules as tables of actions, and their simulation."""
