"""Advantages: each method's mathematics in one module of pure functions."""
