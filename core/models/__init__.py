"""Load, tokenise, apply chat templates, score tokens, adapters."""
