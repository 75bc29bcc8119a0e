"""Kernels in plain PyTorch, one for each op contract."""
