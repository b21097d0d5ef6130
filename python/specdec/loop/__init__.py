"""The decoding loop: one step on the device, and the host's side of a batch around it."""
