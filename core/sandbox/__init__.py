"""Where commands of an agent run: one protocol, in Docker or in processes of this machine."""
