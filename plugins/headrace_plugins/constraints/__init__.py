"""Constraint engines: what a grammar of any kind allows, enforced token by token.

    Grammar (kind, text) -> its reader -> grammar IR -> llguidance (Lark) or xgrammar (EBNF) -> Compiled -> Matcher

JSON schemas are first turned into an algebra of shapes (`schema/`), in which every keyword has its exact meaning or is
refused by name; what engines see is plain grammar, so that no engine can ignore a keyword.
"""
