"""What the devices of a fleet can do: memory, speed, link and availability, and over which time."""
