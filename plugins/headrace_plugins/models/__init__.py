"""Model architectures for torch-family backends (`headrace.modeling`)."""
