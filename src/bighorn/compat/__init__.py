"""Thin faces with the names, argument orders and errors of other systems; nothing here computes anything of its own."""
