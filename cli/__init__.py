"""The command line: options in, one call into core, records out."""
