"""Variants beside neighbours: latency tables by interference level, selections per level, and which to keep."""
