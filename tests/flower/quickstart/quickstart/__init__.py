"""A Flower app for PyTorch."""
