"""Processes of a run: started, joined to a group, watched, started again, and stopped."""
