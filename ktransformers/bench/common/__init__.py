"""What all measurements share: tables and records, the machine, clocks, random weights."""
