"""Accuracy under local differential privacy: the command `fedp3 utility`."""
