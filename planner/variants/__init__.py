"""Variants of a plan with prices of their own: asynchronous, servers, slices, replicas, shares."""
