"""The device's part of speculation: a draft model's steps, guesses that the host has not read, and their verification."""
