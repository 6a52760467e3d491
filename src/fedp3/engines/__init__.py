"""Engines carry tasks to clients and replies back; they decide nothing."""
