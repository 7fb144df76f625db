"""The model to train: its files, configuration, tokenizer and weights, adapters, and which model types are allowed."""
