"""Learned placers: an extension that finds pipelines instead of the dynamic program."""
