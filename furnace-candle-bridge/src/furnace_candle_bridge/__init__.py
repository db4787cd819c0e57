"""furnace-candle-bridge: an engine in Rust, on candle.

Importing this package loads neither the native module nor numpy; `furnace_candle_bridge.plugin` is the entry point, and
the model is in `furnace_candle_bridge.decoder`.
"""
