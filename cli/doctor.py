"""strop doctor (placeholder until its helper writes it)."""
