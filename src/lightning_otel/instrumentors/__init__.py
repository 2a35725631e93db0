"""One member for each library whose calls become spans; members do not know each other."""
