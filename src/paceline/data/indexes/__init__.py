"""What a data set holds, found out once and shared by all processes."""
