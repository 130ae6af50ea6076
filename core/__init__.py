"""What the tools do: pure functions on records and arrays, and the few rooms that touch the world."""
