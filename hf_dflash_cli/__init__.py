"""The command line. Owns: one module per command. Does not know: how anything is done; it calls the library."""
