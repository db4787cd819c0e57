"""The HTTP APIs, one folder each: types, parsing, rendering and the route."""
