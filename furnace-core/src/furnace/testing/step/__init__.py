"""Checks of a step model: what the scheduler relies on."""
