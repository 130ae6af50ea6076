"""Generate: token ids in; token ids, log-probabilities and stop reason out. One protocol, three rooms."""
