"""Flower apps that carry out a run, and the processes and certificates around them."""
