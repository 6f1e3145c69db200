"""Training steps of a rank: stages executed in the order of the schedule, and their trainer."""
