"""What a machine has and does: memory, devices and links, and how fast they are."""
