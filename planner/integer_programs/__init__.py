"""Integer programs: their construction and their solvers."""
