"""The device's part of speculation: a draft model's steps, guesses that are launched ahead, and their verification."""
