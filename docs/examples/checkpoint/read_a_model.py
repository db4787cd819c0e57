"""Reads a model's shape and weights, as the author of an engine does."""

import sys

from furnace.checkpoint import open_checkpoint


def main(model: str = "tiny-lm") -> None:
    """Print what a decoder for the model looks like, and how each of its tensors is stored."""
    with open_checkpoint(model) as checkpoint:
        spec = checkpoint.spec
        print(f"{checkpoint.name}: {spec.num_layers} layers of {spec.hidden_size}, {spec.num_heads} heads")
        print(f"{len(checkpoint.rotary_frequencies())} rotary pairs, windows {[spec.window(i) for i in range(2)]}")
        for role, shape in spec.tensor_shapes().items():
            stored = checkpoint.raw(role)  # mapped, as in the file
            weights = checkpoint.tensor(role)  # float32
            assert weights.shape == stored.shape == shape
            print(role, shape, stored.type.name, f"{stored.rows.nbytes} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
