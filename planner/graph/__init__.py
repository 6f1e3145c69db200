"""The graph of a model: nodes, shapes, blocks; layouts of tensors; dimensions with a meaning."""
