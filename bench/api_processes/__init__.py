"""How many tokens a second API processes carry, measured with a stub in place of the engine."""
