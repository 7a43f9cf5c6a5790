"""A run around the step: the loop, text, checkpoints, Hugging Face's files."""
