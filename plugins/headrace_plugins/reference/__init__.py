"""Backend `reference`: any model of the op table, with PyTorch on the CPU."""
