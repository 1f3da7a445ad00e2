"""Building an engine: opened -> planned -> loaded -> arranged -> captured; and the process of a rank that follows."""
