"""The specification: one tensor at a time, any floating dtype, any device, written for readers."""
