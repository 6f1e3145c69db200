"""Options of a user: parsed, checked, and where they apply."""
