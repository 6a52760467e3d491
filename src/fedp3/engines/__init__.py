"""Engines carry messages between server and clients; everything that decides is in the core."""
