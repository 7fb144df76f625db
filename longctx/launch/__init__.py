"""Start and configure processes on any machine."""
