"""The longest rows that train, on 1, 2, 4 and 8 devices, and the seconds that a step takes: see __main__.py."""
