"""furnace-torch: the portable and exact engine, on PyTorch.

Importing this package loads no torch; `furnace_torch.plugin` is the entry point, and the model is in
`furnace_torch.decoder`.
"""
