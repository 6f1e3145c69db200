"""Questions about a plan: compared, estimated, explained, varied, priced again."""
