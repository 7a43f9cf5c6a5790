"""What did the compiler make of it? The compiled program, read."""
