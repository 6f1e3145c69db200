"""Options of a user: declaration, parsing, checks, and surroundings such as hosts and terminals."""
