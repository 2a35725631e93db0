"""What the doors show: reads for the command line and the viewer, each with its own SQL."""
