"""The command line: `llmpar COMMAND`."""
