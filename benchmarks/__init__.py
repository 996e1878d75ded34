"""How fast Paceline is, beside what people would use instead; run with `make bench`."""
