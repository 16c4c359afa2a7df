"""Triton implementations; imported only when a table asks for them."""
