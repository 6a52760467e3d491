"""Speed as ratios measured in one run, interleaved with a bare PyTorch loop that does the same work."""
