"""Accuracy at equal bytes: methods with the same codes in both directions, on one fleet."""
