"""tiny-lm: a small trained model in the Hugging Face layout, the default of every engine."""

__all__: list[str] = []
