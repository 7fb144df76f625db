"""The parallel degrees, the types that cross stages, and the one place that cuts batches and shifts labels."""
