"""Moving payloads between pipeline ranks. Knows no schedule and no model."""
