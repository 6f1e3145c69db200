"""Programs: the forms in which captured models and stages are stored and interpreted."""
