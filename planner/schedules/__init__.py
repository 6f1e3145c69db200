"""Pipeline schedules as tables of actions, their list and their checks."""
