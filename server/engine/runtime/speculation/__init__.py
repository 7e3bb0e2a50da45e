"""The device's part of speculation: a draft model's steps, and draft tokens that the host has not read."""
