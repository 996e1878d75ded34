"""What everything else stands on: the processes, the counters, the names and the errors."""
