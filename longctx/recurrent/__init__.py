"""Layers that carry a state from token to token: gated delta rules, state-space layers and short convolutions."""
