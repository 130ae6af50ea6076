"""What an agent acts in."""
