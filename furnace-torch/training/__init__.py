"""The recipe of tiny-lm: data, tokenizer, training, evaluation."""
