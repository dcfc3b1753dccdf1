"""The DeepSpeed glue: binds a scheme to one engine. Only ``seams`` names DeepSpeed internals."""
