"""JSON Schema to grammar: documents and references, the algebra of shapes, and what is written of them."""
