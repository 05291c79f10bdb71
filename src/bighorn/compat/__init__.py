"""Thin compatibility layers with the names, argument orders and errors of other systems; they add no mathematics."""
