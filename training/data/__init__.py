"""Training data: prompts of every kind, answered by the target itself."""
