"""How long sequences can be, on which devices, and how fast: `python -m longctx.plan`, before anything runs."""

from longctx.plan.candidates import Candidate, Machine, Outlook, candidates, outlook, recommend

__all__ = ["Candidate", "Machine", "Outlook", "candidates", "outlook", "recommend"]
