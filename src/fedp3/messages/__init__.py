"""The messages between server and clients: byte format, framing and upload compression."""
