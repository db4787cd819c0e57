"""Checks of an engine: what the server relies on."""
