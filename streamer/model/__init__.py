"""The forward pass. Never opens a file: weights and experts arrive through sources."""
