"""Plain torch on groups of tensors of bounded size, for any device."""
