"""strop: Unix tools for loops in which a language model improves on its own work."""

__version__ = "0.1.0"
