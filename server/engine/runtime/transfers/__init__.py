"""Transfers between the host and the device between two steps."""
