"""The sequence-chunked step: layers run over a few tokens at a time, and the other tokens wait in host memory.

A layer's tokens depend on each other in attention alone. So a layer is run chunk by chunk up to its attention, whose
queries, keys and values go to the host; attention is computed there block against block; then the layer is run again,
chunk by chunk, this time through. Backward goes the same three ways in reverse. What the device holds at once does not
grow with the sequence, forward or backward, and the results are those of the whole layer.
"""
