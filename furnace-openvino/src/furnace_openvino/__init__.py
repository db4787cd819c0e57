"""furnace-openvino: the fast CPU engine, on OpenVINO.

Importing this package loads neither openvino nor numpy; `furnace_openvino.plugin` is the entry point, and the model is
in `furnace_openvino.decoder`.
"""
