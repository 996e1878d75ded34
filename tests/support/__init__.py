"""What tests share: processes, pages, waiting, and the small helpers that several rooms use."""
