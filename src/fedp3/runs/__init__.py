"""Runs: their folders, checkpoints, records and results."""
