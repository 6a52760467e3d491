"""Speed as ratios to a plain PyTorch loop that does the same work, measured in turn with it."""
