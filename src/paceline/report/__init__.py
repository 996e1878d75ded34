"""Reports: what runs did, as one HTML page."""
