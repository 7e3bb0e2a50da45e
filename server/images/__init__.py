"""Images of prompts: where they come from, and the process that decodes and prepares them."""
