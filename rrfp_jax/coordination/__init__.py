"""Who is there, and how all of them agree. Knows no model and no payload."""
