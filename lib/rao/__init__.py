"""Recursive Agent Optimization (arXiv 2605.06639)."""
