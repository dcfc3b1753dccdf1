"""The ``ds_quant`` command: a module per subcommand, and modules that they share."""
