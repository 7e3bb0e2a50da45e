"""What goes from the host to the device and back between two steps."""
