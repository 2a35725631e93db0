"""Readers of what goes over a wire, one for each dialect: JSON in, messages and attributes out."""
