"""Learned placers: an extension that finds pipelines in place of the dynamic program."""
