"""Put documents into packs: lengths in, bins out."""
