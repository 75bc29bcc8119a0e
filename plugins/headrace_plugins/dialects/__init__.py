"""Dialects: how the chats of a model family are written, its tool calls constrained, and its answers read."""
