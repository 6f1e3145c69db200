"""Options of a user: declaration, parsing, checks; output streams, progress and formatting."""
