"""Cache between commands: captures, plans, and the memory of plans; and the profile database."""
