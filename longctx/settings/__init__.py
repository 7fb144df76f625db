"""Flags, profile, environment and the model's config -> one typed, frozen run, with every check between them."""
