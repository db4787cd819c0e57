"""Engines and hooks as they were written for version 1 of the contracts and of the hooks."""
