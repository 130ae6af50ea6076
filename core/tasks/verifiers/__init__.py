"""Verifiers: a response and a task in, a verdict out."""
