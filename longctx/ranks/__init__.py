"""What ranks do together: agree, take turns, end together, and watch each other."""
