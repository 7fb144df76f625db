"""The parallel degrees, the types that cross stages, and the functions that cut batches and shift labels."""
