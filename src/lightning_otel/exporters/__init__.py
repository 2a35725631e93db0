"""Ways out of the process for ended spans; members do not know each other."""
