"""The commands: one module each, with a `main()`."""
