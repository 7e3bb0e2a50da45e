"""States that layers keep of a sequence other than keys and values: kinds of state, and the pool that holds them."""
