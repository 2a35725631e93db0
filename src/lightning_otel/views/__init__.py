"""Read models of the doors: queries for the command line and the viewer."""
