"""The DeepSpeed glue: attach a scheme to one engine. Only the hooks name DeepSpeed internals."""
