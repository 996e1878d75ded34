"""All that differs between vision problems, one file a task."""
