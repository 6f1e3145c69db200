"""Actions of commands: load the inputs, call the product, and print or write the result."""
