"""Ring attention over packed documents: plan, communication, operator."""
