"""Pipeline schedules as tables of actions: their orders, their catalogue and their checks."""
