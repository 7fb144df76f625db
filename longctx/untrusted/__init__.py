"""Input of unknown origin: read in a bounded process, its files and links checked, and kept out of imports."""
