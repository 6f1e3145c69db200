"""Commands for programs: the schemas of their JSON, and a skill for agents."""
