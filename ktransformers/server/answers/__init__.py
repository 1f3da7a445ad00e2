"""From a neutral request to neutral events: what every dialect of the API shares. Knows no wire format."""
