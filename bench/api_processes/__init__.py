"""How many tokens a second API processes carry, without a model: an engine that only pretends."""
